"""Fine-tune an exported encoder with CTC on transcribed speech, with transformers' Trainer; jiwer computes the WER.

    nest-ssl export nest.nemo exported
    python examples/finetune_ctc.py exported --train train.jsonl --test valid.jsonl --output ctc

Manifests are NeMo's, with `text`. Needs nest-ssl[hf,finetune]. The output folder loads with `from_pretrained` of
ParakeetForCTC, AutoFeatureExtractor and AutoTokenizer.
"""

from __future__ import annotations

import argparse
import re
import unicodedata
from pathlib import Path
from typing import Any

import jiwer
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoFeatureExtractor, ParakeetForCTC, ParakeetTokenizer, Trainer, TrainingArguments, set_seed

from nest_ssl.audio import read_audio
from nest_ssl.data import open_manifests

BLANK = "<blank>"


def normalize(text: str) -> str:
    """Reduce a text to its words: lower case, letters and apostrophes, single spaces."""
    text = unicodedata.normalize("NFC", text).lower()
    return " ".join(re.sub(r"[^\w' ]|[\d_]", " ", text).split())


def make_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Train a subword tokenizer on the texts; token 0 is the blank.

    Single letters are too short: read speech has about 14 per second, the encoder 12.5 frames.
    """
    subwords = Tokenizer(models.BPE())
    subwords.pre_tokenizer, subwords.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[BLANK], show_progress=False)
    subwords.train_from_iterator(texts, trainer)
    return ParakeetTokenizer(tokenizer_object=subwords, pad_token=BLANK)


class Transcribed(Dataset[dict[str, Any]]):
    """The waveforms and texts of a manifest, read on demand."""

    def __init__(self, manifest: str, sample_rate: int) -> None:
        self.utterances = open_manifests(manifest)
        self.sample_rate = sample_rate
        self.texts = []
        for utterance in self.utterances:
            text = normalize(str(utterance.extra.get("text") or ""))
            if not text:
                raise SystemExit(f"{utterance.manifest}:{utterance.line}: no 'text' to learn from.")
            self.texts.append(text)

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> dict[str, Any]:
        one = self.utterances[index]
        samples = read_audio(
            one.audio_filepath, sample_rate=self.sample_rate, offset_s=one.offset_s, duration_s=one.duration_s
        )
        return {"samples": samples, "text": self.texts[index]}


class Collator:
    """Makes a batch: log-mel features like those the encoder was trained on, and labels padded with the blank."""

    def __init__(self, extractor: Any, tokenizer: Any) -> None:
        self.extractor, self.tokenizer = extractor, tokenizer

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self.extractor(
            [row["samples"] for row in rows], sampling_rate=self.extractor.sampling_rate, return_tensors="pt"
        )
        labels = self.tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt").input_ids
        return {"input_features": batch.input_features, "attention_mask": batch.attention_mask, "labels": labels}


def warn_about_fast_speech(data: Transcribed, collator: Collator, model: Any) -> None:
    """Print how many utterances CTC cannot learn from, because they have more labels than frames."""
    frame_s = model.config.encoder_config.subsampling_factor * collator.extractor.hop_length / data.sample_rate
    pairs = zip(data.utterances, data.texts, strict=True)
    too_fast = [
        one
        for one, text in pairs
        if one.duration_s is not None and len(collator.tokenizer(text).input_ids) > one.duration_s / frame_s
    ]
    if too_fast:
        print(f"{len(too_fast)} of {len(data)} utterances have more labels than frames; raise --vocab-size.")


@torch.inference_mode()
def transcribe(model: Any, data: Transcribed, collator: Collator, batch_size: int) -> list[str]:
    """Return the model's transcript of each utterance."""
    model.eval()
    texts: list[str] = []
    for start in range(0, len(data), batch_size):
        rows = [data[index] for index in range(start, min(start + batch_size, len(data)))]
        inputs = {name: tensor.to(model.device) for name, tensor in collator(rows).items() if name != "labels"}
        texts += collator.tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    return texts


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path, help="folder written by 'nest-ssl export'")
    parser.add_argument("--train", required=True, help="manifest with texts to train on")
    parser.add_argument("--test", required=True, help="manifest with texts to test on")
    parser.add_argument("--output", type=Path, required=True, help="folder for the fine-tuned model")
    parser.add_argument("--vocab-size", type=int, default=256, help="number of subwords, including the blank")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--freeze-encoder", action="store_true", help="train only the head")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    args = parse_arguments(arguments)
    set_seed(args.seed)
    extractor = AutoFeatureExtractor.from_pretrained(args.exported)
    train, test = (Transcribed(manifest, extractor.sampling_rate) for manifest in (args.train, args.test))
    tokenizer = make_tokenizer(train.texts, args.vocab_size)
    model = ParakeetForCTC.from_pretrained(
        args.exported / "ctc",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        ignore_mismatched_sizes=True,  # the head is new anyway
    )
    model.encoder.requires_grad_(not args.freeze_encoder)
    collator = Collator(extractor, tokenizer)
    warn_about_fast_speech(train, collator, model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.output),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            warmup_steps=max(1, args.max_steps // 10),
            bf16=torch.cuda.is_available(),
            logging_steps=max(1, args.max_steps // 10),
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            seed=args.seed,
        ),
        train_dataset=train,
        data_collator=collator,
    )
    trainer.train()
    heard = transcribe(model, test, collator, args.batch_size)
    result = {"wer": jiwer.wer(test.texts, heard), "cer": jiwer.cer(test.texts, heard)}
    for said, text in list(zip(test.texts, heard, strict=True))[:3]:
        print(f"said:  {said}\nheard: {text}")
    print(f"{len(test)} utterances: WER {100 * result['wer']:.1f} %, CER {100 * result['cer']:.1f} %")
    model.save_pretrained(args.output)
    extractor.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    return result


if __name__ == "__main__":
    main()
