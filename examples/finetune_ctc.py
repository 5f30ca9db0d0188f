"""Fine-tune an exported encoder with CTC on transcribed speech, by transformers' own Trainer; WER by jiwer.

    nest-ssl export nest.nemo exported
    python examples/finetune_ctc.py exported --train train.jsonl --test valid.jsonl --output ctc

Manifests are NeMo's, with `text`. Needs nest-ssl[hf,finetune]. The output folder loads with
`ParakeetForCTC.from_pretrained` and `AutoFeatureExtractor.from_pretrained`; `vocab.json` has its characters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import jiwer
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoFeatureExtractor, ParakeetForCTC, Trainer, TrainingArguments, set_seed

from nest_ssl.audio import read_audio
from nest_ssl.data import open_manifests


def normalize(text: str) -> str:
    """Lower case, letters and apostrophes, single spaces: what is said, without how it is written."""
    text = unicodedata.normalize("NFC", text).lower()
    return " ".join(re.sub(r"[^\w' ]|[\d_]", " ", text).split())


class Characters:
    """Texts as numbers: one for each character, and the blank after them."""

    def __init__(self, texts: list[str]) -> None:
        self.characters = sorted(set("".join(texts)))
        self.blank = len(self.characters)
        self._numbers = {character: number for number, character in enumerate(self.characters)}

    def encode(self, text: str) -> list[int]:
        return [self._numbers[character] for character in text if character in self._numbers]

    def decode(self, frames: list[int]) -> str:
        """Greedy CTC: repeats are one, blanks are none."""
        numbers = [number for number, _ in itertools.groupby(frames) if number != self.blank]
        return " ".join("".join(self.characters[number] for number in numbers).split())


class Transcribed(Dataset[dict[str, Any]]):
    """Waveforms and texts of a manifest, read when asked for."""

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
    """A batch: log-mel features as the encoder was trained on, and labels padded with the blank."""

    def __init__(self, extractor: Any, characters: Characters) -> None:
        self.extractor, self.characters = extractor, characters

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self.extractor(
            [row["samples"] for row in rows], sampling_rate=self.extractor.sampling_rate, return_tensors="pt"
        )
        labels = [torch.tensor(self.characters.encode(row["text"])) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=self.characters.blank)
        return {"input_features": batch.input_features, "attention_mask": batch.attention_mask, "labels": padded}


@torch.inference_mode()
def transcribe(model: Any, data: Transcribed, collator: Collator, batch_size: int) -> list[str]:
    """What the model hears, utterance by utterance."""
    model.eval()
    texts: list[str] = []
    for start in range(0, len(data), batch_size):
        rows = [data[index] for index in range(start, min(start + batch_size, len(data)))]
        inputs = {name: tensor.to(model.device) for name, tensor in collator(rows).items() if name != "labels"}
        texts += [collator.characters.decode(frames) for frames in model.generate(**inputs).tolist()]
    return texts


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path, help="folder of 'nest-ssl export'")
    parser.add_argument("--train", required=True, help="manifest with texts to learn from")
    parser.add_argument("--test", required=True, help="manifest with texts to test on")
    parser.add_argument("--output", type=Path, required=True, help="folder of the fine-tuned model")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--freeze-encoder", action="store_true", help="train the head alone")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    args = parse_arguments(arguments)
    set_seed(args.seed)
    extractor = AutoFeatureExtractor.from_pretrained(args.exported)
    train, test = (Transcribed(manifest, extractor.sampling_rate) for manifest in (args.train, args.test))
    characters = Characters(train.texts)
    model = ParakeetForCTC.from_pretrained(
        args.exported / "ctc",
        vocab_size=len(characters.characters) + 1,
        pad_token_id=characters.blank,
        ignore_mismatched_sizes=True,  # the head is new in any case
    )
    model.encoder.requires_grad_(not args.freeze_encoder)
    collator = Collator(extractor, characters)
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
    (args.output / "vocab.json").write_text(json.dumps(characters.characters, ensure_ascii=False))
    return result


if __name__ == "__main__":
    main()
