"""Steps: the same losses and gradients by the plain model, by fused layers and by CUDA graphs."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.fast import encoder as fused_encoder
from nest_ssl.fast import engine as engines
from nest_ssl.fast.engine import Batch, accelerate, decide
from nest_ssl.fast.graphs import Lane, Padding
from nest_ssl.objective import MaskedPrediction
from nest_ssl.training.step import TrainStep
from tests.helpers import NO_DROPOUT, gradients_of, noise_batch, tiny_model, train_on, train_step

# With a start in every frame the mask does not depend on chance.
EXACT: dict[str, Any] = {**NO_DROPOUT, "masking.mask_prob": 1.0}


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's convolutions round to TF32 by default: 1e-3, where the comparisons are of 1e-5."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def batch_of(lengths: list[int], device: str = "cpu", seed: int = 0) -> Batch:
    made = noise_batch(lengths, seed)
    return (
        made["input_signal"].to(device),
        made["input_signal_length"].to(device),
        made["noisy_input_signal"].to(device),
        made["noisy_input_signal_length"].to(device),
    )


def plain_gradients(model: Any, batch: Batch, share: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model.masked_loss(*batch).loss
    (share * loss).backward()
    found = gradients_of(model)
    model.zero_grad()
    return loss.detach(), found


class TestOnACpu:
    def test_gradients_are_those_of_the_models_own_loss(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        loss, wanted = plain_gradients(model, batch, 0.25)
        assert torch.equal(train_on(train_step(model, accumulate=4), batch), loss)
        found = gradients_of(model)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, msg=name)

    def test_they_replace_what_was_there_or_are_added_to_it(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        step = train_step(model)
        for _ in range(2):
            train_on(step, batch)
        once = gradients_of(model)
        step = train_step(model, accumulate=3)
        for begins, updates in ((True, False), (False, False), (False, True)) * 2:
            train_on(step, batch, begins=begins, updates=updates)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, once[name], msg=name)

    def test_a_scaler_scales_the_gradient_and_not_the_loss(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        loss, wanted = plain_gradients(model, batch)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        step = train_step(model, scaler=scaler)
        assert torch.equal(train_on(step, batch, updates=False), loss)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, 1024 * wanted[name], rtol=1e-4, atol=1e-3, msg=name)

    def test_frozen_and_unreached_parameters_have_no_gradient(self) -> None:
        model, batch = tiny_model({**EXACT, "quantizer.freeze": False}).train(), batch_of([20_000, 16_000])
        model.encoder.layers[0].requires_grad_(False)
        train_on(train_step(model), batch)
        without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert without == ["quantizer.codebooks", "quantizer.proj.weight"]
        assert all(p.grad is None for p in model.encoder.layers[0].parameters())

    def test_the_forward_pass_runs_under_autocast_and_the_backward_pass_outside(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        step, within = train_step(model, autocast=torch.bfloat16), []
        model.encoder.register_forward_hook(lambda *_: within.append(torch.is_autocast_enabled("cpu")))
        step.watch.backward_begins = lambda loss: within.append(torch.is_autocast_enabled("cpu"))  # type: ignore[method-assign]
        train_on(step, batch)
        assert within == [True, False]
        within.clear()
        with torch.autocast("cpu", torch.bfloat16):
            train_on(train_step(model), batch)  # float32 whatever surrounds it
        assert within[0] is False

    def test_evaluation_is_the_plain_model_without_gradients(self) -> None:
        model, batch = tiny_model({"masking.mask_prob": 0.1}).eval(), batch_of([20_000, 16_000])
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model.masked_loss(*batch)
        torch.manual_seed(1)
        found = accelerate(model, compile="on", autocast=torch.bfloat16).evaluate(batch)
        assert torch.equal(found.loss, wanted.loss)
        assert not found.loss.requires_grad

    def test_fused_layers_give_the_plain_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused_encoder, "compiled", lambda function, budget: function)
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        loss, wanted = plain_gradients(copy.deepcopy(model), batch)
        step = train_step(model, compile="on")
        torch.testing.assert_close(train_on(step, batch), loss, atol=1e-5, rtol=1e-5)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, wanted[name], atol=2e-5, rtol=1e-3, msg=name)
        assert step.engine.num_graphs == 0
        assert "forward" not in vars(model.encoder)

    def test_a_context_that_is_given_is_the_one_that_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused_encoder, "compiled", lambda function, budget: function)
        model = tiny_model({**EXACT, "encoder.att_context_size": [[4, 2], [-1, -1]]}).train()
        batch, losses = batch_of([60_000, 50_000]), {}
        for context in model.encoder.contexts:
            for compile in ("off", "on"):
                step = train_step(copy.deepcopy(model), compile=compile)
                losses[compile, context] = train_on(step, batch, context=context)
            torch.testing.assert_close(losses["on", context], losses["off", context], atol=1e-5, rtol=1e-5)
        assert losses["on", (4, 2)] != losses["on", (-1, -1)]

    def test_audio_of_two_sizes_is_no_obstacle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused_encoder, "compiled", lambda function, budget: function)
        audio, length, noisy, _ = batch_of([20_000, 16_000])
        batch = (audio, length, torch.nn.functional.pad(noisy, (0, 1_000)), length)
        model = tiny_model(EXACT).train()
        loss, _ = plain_gradients(copy.deepcopy(model), batch)
        found = train_on(train_step(model, compile="on"), batch)
        torch.testing.assert_close(found, loss, atol=1e-4, rtol=1e-4)

    def test_the_budget_is_the_configurations_unless_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        budgets: list[float] = []

        def compiled(function: Any, budget: float) -> Any:
            budgets.append(budget)
            return function

        monkeypatch.setattr(fused_encoder, "compiled", compiled)
        model, batch = tiny_model({"activation_budget": 0.7}).train(), batch_of([20_000, 16_000])
        train_on(train_step(model, compile="on"), batch)
        step = train_step(model)
        step.engine = accelerate(model, compile="on", activation_budget=0.4)
        train_on(step, batch)
        assert budgets == [0.7, 0.4]

    def test_a_models_own_objective_is_not_bypassed(self) -> None:
        class Other(EncDecDenoiseMaskedTokenPredModel):
            def masked_loss(self, *batch: Tensor, **options: Any) -> MaskedPrediction:
                prediction = super().masked_loss(*batch, **options)
                prediction.loss = 2 * prediction.loss
                return prediction

        model = tiny_model(EXACT).train()
        model.__class__ = Other
        step, batch = train_step(model, compile="on"), batch_of([20_000, 16_000])
        assert step.engine.description == "plain layers: Other has an objective of its own"
        assert torch.equal(train_on(step, batch), model.masked_loss(*batch).loss)

    @pytest.mark.parametrize(
        ("compile", "no_graphs", "words"),
        [
            ("off", None, "plain layers: model.compile is off"),
            ("auto", None, "plain layers: the model is not on a CUDA GPU"),
            ("on", None, "fused layers, no CUDA graphs: the model is not on a CUDA GPU"),
        ],
    )
    def test_the_decision_is_logged_once_with_its_reason(
        self, compile: str, no_graphs: str | None, words: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        engine = accelerate(tiny_model(), compile=compile, no_graphs=no_graphs)
        engine.refresh()
        assert engine.description == words
        assert caplog.messages.count(f"Training runs with {words}.") == 1

    def test_an_unknown_mode_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'fast' is not auto, on or off"):
            accelerate(tiny_model(), compile="fast")

    def test_a_hooked_or_changed_encoder_stays_plain(self) -> None:
        model = tiny_model()
        model.encoder.layers[0].register_forward_hook(lambda *_: None)
        assert "hooks" in str(decide(model, "on", None, None))


class StandIn:
    """Takes the place of a CUDA graph on a CPU: a replay runs the recorded step."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class LaneOnACpu(Lane):
    """Takes the place of a stream and its memory."""

    room = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def renew(self) -> None:
        pass

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        yield

    computing = entered

    def record(self, run: Callable[[], None]) -> Any:
        return StandIn(run)

    def has_room(self, num_bytes: int) -> bool:
        return self.room


class TestGraphsByAStandIn:
    """What surrounds a graph: padding, copying, checking, giving up. TestOnAGpu has the graphs themselves."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused_encoder, "compiled", lambda function, budget: function)
        monkeypatch.setattr(engines, "Lane", LaneOnACpu)
        monkeypatch.setattr(
            engines, "decide", lambda model, mode, cast, no_graphs: engines.Plan(True, not no_graphs, no_graphs)
        )

    def test_every_step_gives_the_plain_gradients(self) -> None:
        # Without running statistics in the way, a step depends on its batch alone.
        model = tiny_model({**EXACT, "encoder.conv_norm_type": "layer_norm"}).train()
        plain, step = copy.deepcopy(model), train_step(model)
        lengths = ([24_000, 16_007], [24_000, 17_000], [23_700, 20_000], [23_900, 9_000], [60_000, 50_000])
        for seed, n in enumerate(lengths):
            batch = batch_of(n, seed=seed)
            loss, wanted = plain_gradients(plain, batch)
            torch.testing.assert_close(train_on(step, batch), loss, atol=1e-5, rtol=1e-5)
            found = gradients_of(model)
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3, msg=name)
        assert step.engine.num_graphs == 1  # the four first share a padded size; the last was seen once

    def test_accumulation_has_two_graphs_for_a_shape(self) -> None:
        model = tiny_model({**EXACT, "encoder.conv_norm_type": "layer_norm"}).train()
        plain, step = copy.deepcopy(model), train_step(model, accumulate=2)
        batches = [batch_of([24_000, 16_007], seed=seed) for seed in range(2)]
        _, first = plain_gradients(plain, batches[0], 0.5)
        _, second = plain_gradients(plain, batches[1], 0.5)
        for _ in range(3):
            for number, batch in enumerate(batches):
                train_on(step, batch, begins=number == 0, updates=number == 1)
        assert step.engine.num_graphs == 2
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, first[name] + second[name], atol=2e-5, rtol=1e-3, msg=name)

    def test_a_check_leaves_no_trace(self) -> None:
        """The run that is checked in its second and third step has the weights and statistics of one that is not."""

        def trained(check_every: int) -> tuple[TrainStep, dict[str, Tensor]]:
            model = tiny_model(EXACT).train()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
            step = train_step(model, optimizer=optimizer, check_every=check_every)
            if not check_every:
                step.engine._checked = lambda graph, *_: graph  # type: ignore[method-assign]
            for seed in range(4):
                torch.manual_seed(seed)
                train_on(step, batch_of([24_000, 16_007], seed=seed))
            return step, {**model.state_dict(), "losses": step.results.losses}

        checked, with_checks = trained(1)
        _, without = trained(0)
        assert checked.engine.num_graphs == 1
        for name, value in without.items():
            assert torch.equal(with_checks[name], value), name

    def test_a_replay_that_differs_ends_graphs_and_not_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def record(lane: LaneOnACpu, run: Callable[[], None]) -> Any:
            def wrong() -> None:
                run()
                step.results.outcome.mul_(1.01)

            return StandIn(wrong)

        monkeypatch.setattr(LaneOnACpu, "record", record)
        model, batch = tiny_model(EXACT).train(), batch_of([24_000, 16_007])
        told: list[str] = []
        step = train_step(model)
        step.engine.on_mismatch = told.append
        loss, _ = plain_gradients(copy.deepcopy(model), batch)
        for _ in range(3):
            torch.testing.assert_close(train_on(step, batch), loss, atol=1e-4, rtol=1e-4)
        assert len(told) == 1
        assert "a replayed step differs from the same step uncaptured: rank 0: loss and gradient norm" in told[0]
        assert step.engine.num_graphs == 0
        assert "differed" in step.engine.description

    def test_ranks_capture_together_or_not_at_all(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([24_000, 16_007])
        step = train_step(model)
        step.engine.vote = lambda text: [text, "no room"]
        for _ in range(3):
            train_on(step, batch)
        assert step.engine.num_graphs == 0
        assert step.engine.description == "fused layers and CUDA graphs"  # other shapes may still be captured
        step = train_step(model)
        step.engine.vote = lambda text: [text, "failed: no such operation"]
        for _ in range(3):
            train_on(step, batch)
        assert "rank 1 failed: no such operation" in step.engine.description

    def test_a_graph_that_is_dropped_goes_with_the_others(self) -> None:
        """Where one graph goes, torch frees what all graphs of its stream compute in."""
        step = train_step(tiny_model(EXACT).train())
        for _ in range(2):
            train_on(step, batch_of([24_000, 16_007]))
        recorded: list[weakref.ref[StandIn]] = []
        lane = step.engine._lane
        assert lane is not None

        def record(run: Callable[[], None]) -> StandIn:
            graph = StandIn(run)
            recorded.append(weakref.ref(graph))
            return graph

        lane.record = record  # type: ignore[assignment, method-assign]
        step.engine.vote = lambda text: [text, "no room"]
        for _ in range(2):
            train_on(step, batch_of([60_000, 50_000]))
        gc.collect()
        assert step.engine.num_graphs == 1
        assert recorded[0]() is not None
        step.release()
        gc.collect()
        assert recorded[0]() is None

    def test_several_ranks_need_a_planned_size(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([24_000, 16_007])
        step = train_step(model)
        step.engine.is_shared = True
        assert step.engine._graph_size(batch, None) is None
        assert step.engine._graph_size(batch, 30_000) == Padding.of(model).whole_frames(30_000)

    @pytest.mark.parametrize("planned", [24_000, 30_000, 61_000])
    def test_a_planned_size_that_is_captured_is_found_again(self, planned: int) -> None:
        step = train_step(tiny_model(EXACT).train())
        for _ in range(2):
            assert not step.engine.is_captured(2, planned)
            train_on(step, batch_of([24_000, 16_007]), planned=planned)
        assert step.engine.is_captured(2, planned)
        assert not step.engine.is_captured(3, planned)

    def test_out_of_memory_drops_the_graphs_and_repeats_the_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model(EXACT).train()
        step, other, fails = train_step(model), batch_of([60_000, 50_000]), [True]
        for _ in range(2):
            train_on(step, batch_of([24_000, 16_007]))
        before = {name: value.clone() for name, value in model.named_buffers()}
        loss, _ = plain_gradients(copy.deepcopy(model), other)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        real = step.gradients.backward

        def backward(*args: Any, **options: Any) -> None:
            if fails.pop():
                raise torch.OutOfMemoryError("CUDA out of memory")
            fails.append(False)
            real(*args, **options)

        fails.insert(0, False)
        monkeypatch.setattr(step.gradients, "backward", backward)
        torch.testing.assert_close(train_on(step, other), loss, atol=1e-5, rtol=1e-5)
        assert step.engine.num_graphs == 0
        for name, value in model.named_buffers():
            if name.endswith("num_batches_tracked"):
                assert value == before[name] + 1, name

    def test_out_of_memory_without_graphs_says_what_to_change(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = train_step(tiny_model(EXACT).train())

        def backward(*args: Any, **options: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(step.gradients, "backward", backward)
        with pytest.raises(torch.OutOfMemoryError, match=r"2 utterances x 1\.6 s.*model\.train_ds\.batch_size"):
            train_on(step, batch_of([24_000, 16_007]))

    def test_samples_of_a_longer_batch_do_not_stay_behind(self) -> None:
        model = tiny_model({**EXACT, "encoder.conv_norm_type": "layer_norm"}).train()
        step = train_step(model)
        for lengths in ([24_000, 24_000], [24_000, 24_000], [23_500, 23_500]):
            train_on(step, batch_of(lengths))
        assert step.engine._graphs is not None
        (graph,) = step.engine._graphs._graphs.values()
        assert not graph.inputs.batch[0][:, 23_500:].any()
        assert int(graph.inputs.num_samples) == 23_500

    def test_evaluation_and_other_sizes_are_not_captured(self) -> None:
        model = tiny_model(EXACT).train()
        audio, length, noisy, _ = batch_of([24_000, 16_007])
        step = train_step(model)
        for _ in range(3):
            train_on(step, (audio, length, torch.nn.functional.pad(noisy, (0, 999)), length))
        model.eval()
        for _ in range(3):
            train_on(step, (audio, length, noisy, length))
        assert step.engine.num_graphs == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    def steps(self, step: TrainStep, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
        losses = [train_on(step, batch) for batch in batches]
        return torch.stack(losses), gradients_of(step.model)

    @pytest.mark.parametrize("autocast", [None, torch.bfloat16])
    @pytest.mark.parametrize("overrides", [{}, {"encoder.untie_biases": False}, {"mask_position": "post_conv"}])
    def test_a_replayed_step_repeats_the_uncaptured_one_to_the_bit(
        self, autocast: torch.dtype | None, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With random dropout, dither and masks: loss, gradients, buffers, weights and moments of the same seed."""
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # the subsampling of post_conv is cuDNN's
        model = tiny_model({"masking.mask_prob": 0.1, **overrides}).cuda().train()
        batch, start = batch_of([24_000, 16_007], "cuda"), copy.deepcopy(model.state_dict())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
        step = train_step(model, optimizer=optimizer, autocast=autocast)
        assert step.engine.description == "fused layers and CUDA graphs"
        train_on(step, batch)  # the compiler may pad or autotune in the first step

        def run(seed: int) -> dict[str, Tensor]:
            model.load_state_dict(start)
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
            torch.manual_seed(seed)
            loss = train_on(step, batch)
            moments = {str(n): state["exp_avg_sq"].clone() for n, state in enumerate(optimizer.state.values())}
            named = {name: value.clone() for name, value in model.state_dict().items()}
            return {"loss": loss, **{f"{n} grad": g for n, g in gradients_of(model).items()}, **named, **moments}

        runs = [run(seed) for seed in (7, 7, 8, 7)]  # captured, checked and replayed; replayed three times more
        assert step.engine.num_graphs == 1
        step.engine.refresh()
        wanted = run(7)
        assert step.engine.num_graphs == 0
        for found in (runs[0], runs[1], runs[3]):
            for name, value in wanted.items():
                assert torch.equal(found[name], value), name
        assert not torch.equal(runs[2]["loss"], wanted["loss"])

    @pytest.mark.parametrize("autocast", [None, torch.bfloat16])
    def test_gradients_are_added_by_graphs_as_without_them(self, autocast: torch.dtype | None) -> None:
        model = tiny_model(EXACT).cuda().train()
        batches = [batch_of([24_000, 16_007], "cuda", seed) for seed in range(3)]
        start = copy.deepcopy(model.state_dict())
        step = train_step(model, autocast=autocast, accumulate=3)

        def update() -> dict[str, Tensor]:
            model.load_state_dict(start)
            for index, batch in enumerate(batches):
                torch.manual_seed(index)
                train_on(step, batch, begins=index == 0, updates=index == 2)
            return gradients_of(model)

        update()
        step.engine.refresh()
        wanted = update()
        for _ in range(3):
            found = update()
        assert step.engine.num_graphs == 2  # one with the exchange and the update, one without
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name

    def test_a_replay_allocates_nothing_and_graphs_share_their_memory(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        step = train_step(model, autocast=torch.bfloat16)
        batches = [batch_of(lengths, "cuda") for lengths in ([48_000, 30_000], [24_000, 16_007])]
        for batch in batches * 2:
            train_on(step, batch)
        assert step.engine.num_graphs == 2
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        all_time = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
        for batch in batches * 2:
            train_on(step, batch)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
        # What was allocated and freed again counts too: not even one copy of the gradients in four steps.
        gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - all_time < gradient_bytes

    def test_plain_fused_and_captured_steps_agree(self) -> None:
        plain = tiny_model(EXACT).cuda().train()
        models = [copy.deepcopy(plain) for _ in range(2)]
        lengths = ([24_000, 16_007], [24_000, 17_000], [23_900, 20_000], [24_000, 16_007])
        batches = [batch_of(list(n), "cuda", seed) for seed, n in enumerate(lengths)]
        wanted = self.steps(train_step(plain, compile="off"), batches)
        ours = [train_step(models[0], no_graphs="fused layers alone"), train_step(models[1])]
        for step in ours:
            losses, gradients = self.steps(step, batches)
            torch.testing.assert_close(losses, wanted[0], atol=1e-5, rtol=1e-5)
            for name, gradient in wanted[1].items():
                torch.testing.assert_close(gradients[name], gradient, atol=5e-5, rtol=1e-2, msg=name)
            for (name, buffer), other in zip(plain.named_buffers(), step.model.buffers(), strict=True):
                torch.testing.assert_close(other, buffer, atol=1e-4, rtol=1e-4, msg=name)
        assert [step.engine.num_graphs for step in ours] == [0, 1]

    def test_each_context_has_its_graph(self) -> None:
        model = tiny_model({**EXACT, "encoder.att_context_size": [[4, 2], [-1, -1]]}).cuda().train()
        plain, batch = copy.deepcopy(model), batch_of([60_000, 50_000], "cuda")
        step, reference = train_step(model), train_step(plain, compile="off")
        for _ in range(3):
            for context in model.encoder.contexts:
                found, wanted = (train_on(one, batch, context=context) for one in (step, reference))
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        assert step.engine.num_graphs == 2

    def test_no_step_waits_for_the_device(self) -> None:
        model = tiny_model({"masking.mask_prob": 0.1}).cuda().train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
        step = train_step(model, optimizer=optimizer, autocast=torch.bfloat16)
        batch, other = batch_of([24_000, 16_007], "cuda"), batch_of([40_000, 30_000], "cuda")
        for _ in range(2):  # compiling, capturing and checking may wait, later steps may not
            train_on(step, batch)
        torch.cuda.synchronize()
        step._stay_close = lambda batch: None  # type: ignore[method-assign]  # waits for an older step on purpose
        torch.cuda.set_sync_debug_mode("error")
        try:
            train_on(step, batch)
            train_on(step, other)  # uncaptured
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert step.engine.num_graphs == 1

    def test_without_memory_to_spare_no_graph_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Lane, "has_room", lambda lane, num_bytes: False)
        step = train_step(tiny_model(EXACT).cuda().train())
        self.steps(step, [batch_of([24_000, 16_007], "cuda")] * 3)
        assert step.engine.num_graphs == 0

    def test_out_of_memory_repeats_the_step_without_graphs(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        step = train_step(model)
        for _ in range(3):
            train_on(step, batch_of([24_000, 16_007], "cuda"))
        long = batch_of([1_600_000, 1_500_000], "cuda")
        wanted, _ = plain_gradients(copy.deepcopy(model), long)
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties(0).total_memory
        found, share = None, used / total
        while found is None:  # as little memory as the step needs without graphs: less at first
            share += 0.0005
            torch.cuda.set_per_process_memory_fraction(share)
            with contextlib.suppress(torch.OutOfMemoryError):
                found = train_on(step, long)
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert step.engine.num_graphs == 0
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)

    def test_released_graphs_give_their_memory_back_and_can_be_made_again(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        step, batch = train_step(model), batch_of([24_000, 16_007], "cuda")
        losses, _ = self.steps(step, [batch] * 3)
        assert step.engine.num_graphs == 1
        step.release()
        assert step.engine.num_graphs == 0
        again, _ = self.steps(step, [batch] * 3)
        assert step.engine.num_graphs == 1
        torch.testing.assert_close(again, losses, atol=1e-4, rtol=1e-4)

    def test_float16_and_audio_of_two_sizes_are_not_captured(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        audio, length, noisy, _ = batch_of([24_000, 16_007], "cuda")
        batch, scaler = (audio, length, noisy, length), torch.amp.GradScaler("cuda")
        half = train_step(model, autocast=torch.float16, scaler=scaler)
        for _ in range(3):
            train_on(half, batch)
        assert "float16" in half.engine.description
        uneven = train_step(model)
        for _ in range(3):
            train_on(uneven, (audio, length, torch.nn.functional.pad(noisy, (0, 999)), length))
        assert half.engine.num_graphs == uneven.engine.num_graphs == 0

    def test_a_seeded_step_repeats_and_the_next_one_differs(self) -> None:
        model = tiny_model({"encoder.dropout": 0.5}).cuda().train()
        step, batch = train_step(model), batch_of([24_000, 16_007], "cuda")
        losses = []
        for seed in (1, 2, 3, 3, 4):
            torch.manual_seed(seed)
            losses.append(float(train_on(step, batch)))
        assert losses[2] == losses[3] != losses[4]

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
    def test_weights_and_rates_that_change_are_seen_under_autocast(self, make: Any) -> None:
        """AdamW's step is part of the graph, SGD's is not; the rate becomes 0 after the first steps."""
        model = tiny_model(EXACT).cuda().train()
        rate, options = (0.5, {}) if make is torch.optim.SGD else (0.01, {"fused": True})
        optimizer = make([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0, **options)
        step, batch = (
            train_step(model, optimizer=optimizer, autocast=torch.bfloat16),
            batch_of([24_000, 16_007], "cuda"),
        )
        assert step.updates_in_graph == (make is torch.optim.AdamW)
        losses = [float(train_on(step, batch)) for _ in range(8)]
        assert losses[-1] < losses[2] - 0.01
        optimizer.param_groups[0]["lr"] = 0.0
        train_on(step, batch)
        before = copy.deepcopy(model.state_dict())
        train_on(step, batch)
        for name, value in model.named_parameters():
            assert torch.equal(value, before[name]), name

    def test_a_step_that_is_not_finite_changes_nothing(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
        step, batch = train_step(model, optimizer=optimizer), batch_of([24_000, 16_007], "cuda")
        for _ in range(3):
            train_on(step, batch)
        before = {name: value.clone() for name, value in model.named_parameters()}
        statistics = {name: value.clone() for name, value in model.named_buffers()}
        train_on(step, (batch[0], batch[1], batch[2] * float("nan"), batch[3]))
        assert int(step.results.in_a_row) == 1
        for name, value in model.named_parameters():
            assert torch.equal(value, before[name]), name
        for name, buffer in model.named_buffers():
            buffer.copy_(statistics[name])
        train_on(step, batch)
        assert int(step.results.in_a_row) == 0

    def test_bf16_loss_curves_are_those_of_the_plain_model(self) -> None:
        def curve(compile: str, seed: int) -> Tensor:
            model = tiny_model({"encoder.d_model": 64, "encoder.n_heads": 4}).cuda().train()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, fused=True)
            step = train_step(model, optimizer=optimizer, compile=compile, autocast=torch.bfloat16)
            batches = [batch_of([48_000, 40_000, 36_000, 47_000], "cuda", n) for n in range(4)]
            losses = []
            for number in range(200):
                torch.manual_seed(1000 * seed + number)
                losses.append(train_on(step, batches[number % 4]))
            return torch.stack(losses).view(-1, 40).mean(1).cpu()

        plain, other_seed, fast = curve("off", 1), curve("off", 2), curve("auto", 1)
        noise = float((plain - other_seed).abs().max())
        assert float((fast - plain).abs().max()) < max(3 * noise, 0.05)
        assert fast[-1] < fast[0] - 0.1
