"""The objective: the same gradients by the plain model, by fused layers and by CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.fast import encoder as fused_encoder
from nest_ssl.fast import engine, graphs
from nest_ssl.fast.engine import Batch, Objective, accelerate, decide
from nest_ssl.fast.graphs import Padding
from nest_ssl.objective import MaskedPrediction
from tests.helpers import NO_DROPOUT, noise_batch, tiny_model

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


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients(model: Any, batch: Batch, share: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model.masked_loss(*batch).loss
    (share * loss).backward()
    return loss.detach(), gradients_of(model)


class TestOnACpu:
    def test_gradients_are_those_of_the_models_own_loss(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        loss, wanted = plain_gradients(model, batch, 0.25)
        prediction = accelerate(model).gradients(batch, share=0.25)
        assert torch.equal(prediction.loss, loss)
        assert not any(value.requires_grad for value in vars(prediction).values())
        found = gradients_of(model)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, msg=name)

    def test_they_replace_what_was_there_or_are_added_to_it(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        objective = accelerate(model)
        objective.gradients(batch)
        once = gradients_of(model)
        objective.gradients(batch, adds=False)
        assert all(torch.equal(gradient, once[name]) for name, gradient in gradients_of(model).items())
        objective.gradients(batch, share=0.5, adds=True)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, 1.5 * once[name], msg=name)
        model.zero_grad()
        objective.gradients(batch, adds=True)  # added to nothing
        assert all(torch.equal(gradient, once[name]) for name, gradient in gradients_of(model).items())

    def test_a_scaler_scales_the_gradient_and_not_the_loss(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        loss, wanted = plain_gradients(model, batch)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        prediction = accelerate(model).gradients(batch, scaler=scaler)
        assert torch.equal(prediction.loss, loss)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, 1024 * wanted[name], rtol=1e-4, atol=1e-3, msg=name)

    def test_frozen_and_unreached_parameters_have_no_gradient(self) -> None:
        model, batch = tiny_model({**EXACT, "quantizer.freeze": False}).train(), batch_of([20_000, 16_000])
        model.encoder.layers[0].requires_grad_(False)
        accelerate(model).gradients(batch)
        without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert without == ["quantizer.codebooks", "quantizer.proj.weight"]
        assert all(p.grad is None for p in model.encoder.layers[0].parameters())

    def test_the_loss_is_announced_before_the_backward_pass(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        objective, announced = accelerate(model), []

        def note(loss: Tensor) -> None:
            assert all(p.grad is None for p in model.parameters())
            announced.append(loss)

        objective.on_backward = note
        prediction = objective.gradients(batch)
        assert torch.equal(announced[0], prediction.loss)

    def test_the_forward_pass_runs_under_autocast_and_the_backward_pass_outside(self) -> None:
        model, batch = tiny_model(EXACT).train(), batch_of([20_000, 16_000])
        objective, within = accelerate(model, autocast=torch.bfloat16), []
        model.encoder.register_forward_hook(lambda *_: within.append(torch.is_autocast_enabled("cpu")))
        objective.on_backward = lambda _: within.append(torch.is_autocast_enabled("cpu"))
        objective.gradients(batch)
        assert within == [True, False]
        within.clear()
        with torch.autocast("cpu", torch.bfloat16):
            accelerate(model).gradients(batch)  # float32 whatever surrounds it
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
        objective = accelerate(model, compile="on")
        torch.testing.assert_close(objective.gradients(batch).loss, loss, atol=1e-5, rtol=1e-5)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, wanted[name], atol=2e-5, rtol=1e-3, msg=name)
        assert objective.num_graphs == 0
        assert "forward" not in vars(model.encoder)

    def test_audio_of_two_sizes_is_no_obstacle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fused_encoder, "compiled", lambda function, budget: function)
        audio, length, noisy, _ = batch_of([20_000, 16_000])
        batch = (audio, length, torch.nn.functional.pad(noisy, (0, 1_000)), length)
        model = tiny_model(EXACT).train()
        loss, _ = plain_gradients(copy.deepcopy(model), batch)
        found = accelerate(model, compile="on").gradients(batch).loss
        torch.testing.assert_close(found, loss, atol=1e-4, rtol=1e-4)

    def test_the_budget_is_the_configurations_unless_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        budgets: list[float] = []

        def compiled(function: Any, budget: float) -> Any:
            budgets.append(budget)
            return function

        monkeypatch.setattr(fused_encoder, "compiled", compiled)
        model, batch = tiny_model({"activation_budget": 0.7}).train(), batch_of([20_000, 16_000])
        accelerate(model, compile="on").gradients(batch)
        accelerate(model, compile="on", activation_budget=0.4).gradients(batch)
        assert budgets == [0.7, 0.4]

    def test_a_models_own_objective_is_not_bypassed(self) -> None:
        class Other(EncDecDenoiseMaskedTokenPredModel):
            def masked_loss(self, *batch: Tensor, **options: Any) -> MaskedPrediction:
                prediction = super().masked_loss(*batch, **options)
                prediction.loss = 2 * prediction.loss
                return prediction

        model = tiny_model(EXACT).train()
        model.__class__ = Other
        objective, batch = accelerate(model, compile="on"), batch_of([20_000, 16_000])
        assert objective.description == "plain layers: Other has an objective of its own"
        assert torch.equal(objective.gradients(batch).loss, model.masked_loss(*batch).loss)

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
        objective = accelerate(tiny_model(), compile=compile, no_graphs=no_graphs)
        objective.refresh()
        assert objective.description == words
        assert caplog.messages.count(f"Training runs with {words}.") == 1

    def test_an_unknown_mode_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'fast' is not auto, on or off"):
            accelerate(tiny_model(), compile="fast")

    def test_a_hooked_or_changed_encoder_stays_plain(self) -> None:
        model = tiny_model()
        model.encoder.layers[0].register_forward_hook(lambda *_: None)
        assert "hooks" in str(decide(model, "on", None, None))


class StandIn:
    """Takes the place of a CUDA graph on a CPU: a replay runs the recorded step again."""

    def __init__(self, run: Callable[[], MaskedPrediction], prediction: MaskedPrediction) -> None:
        self.run, self.prediction = run, prediction

    def replay(self) -> None:
        for held, value in zip(vars(self.prediction).values(), vars(self.run()).values(), strict=True):
            held.copy_(value)


class TestGraphsByAStandIn:
    """What surrounds a graph: padding, copying, where gradients are. TestOnAGpu has the graphs themselves."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def record(run: Callable[[], MaskedPrediction], pool: Any) -> tuple[StandIn, MaskedPrediction]:
            prediction = run()
            return StandIn(run, prediction), prediction

        monkeypatch.setattr(fused_encoder, "compiled", lambda function, budget: function)
        monkeypatch.setattr(graphs, "record", record)
        monkeypatch.setattr(graphs, "new_pool", lambda: "pool")
        monkeypatch.setattr(graphs.Graphs, "has_room", lambda _: True)
        monkeypatch.setattr(engine, "decide", lambda *_: engine.Plan(fused=True, graphs=True))

    def test_every_step_gives_the_plain_gradients(self) -> None:
        # Without running statistics in the way, a step depends on its batch alone.
        model = tiny_model({**EXACT, "encoder.conv_norm_type": "layer_norm"}).train()
        plain, objective = copy.deepcopy(model), accelerate(model)
        lengths = ([24_000, 16_007], [24_000, 17_000], [23_700, 20_000], [24_100, 9_000], [60_000, 50_000])
        for seed, n in enumerate(lengths):
            batch = batch_of(n, seed=seed)
            loss, wanted = plain_gradients(plain, batch, 1 / (seed + 1))
            prediction = objective.gradients(batch, share=1 / (seed + 1))
            torch.testing.assert_close(prediction.loss, loss, atol=1e-5, rtol=1e-5)
            found = gradients_of(model)
            assert found.keys() == wanted.keys()
            for name, gradient in wanted.items():
                torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-3, msg=name)
        assert objective.num_graphs == 1  # the four first share a padded size; the last was seen once

    def test_gradients_are_added_and_replaced_across_captured_and_uncaptured_steps(self) -> None:
        model = tiny_model({**EXACT, "encoder.conv_norm_type": "layer_norm"}).train()
        objective, batch, other = accelerate(model), batch_of([24_000, 16_007]), batch_of([60_000, 50_000])
        objective.gradients(batch)
        once = gradients_of(model)
        objective.gradients(other)
        others = gradients_of(model)
        objective.release()

        def check(first: float, second: float) -> None:
            for name, gradient in gradients_of(model).items():
                wanted = first * once[name] + second * others[name]
                torch.testing.assert_close(gradient, wanted, atol=5e-5, rtol=1e-3, msg=name)

        objective.gradients(batch)  # uncaptured
        objective.gradients(batch, share=0.5, adds=True)  # captured: takes over what the first left
        check(1.5, 0)
        objective.gradients(batch)  # captured: replaces
        check(1, 0)
        objective.gradients(other, share=0.25, adds=True)  # uncaptured, into the graphs' gradients
        check(1, 0.25)
        objective.gradients(batch, adds=True)
        check(2, 0.25)
        objective.release()
        objective.gradients(other)  # uncaptured: replaces
        check(0, 1)
        model.zero_grad()
        objective.gradients(other, adds=True)  # captured, added to nothing
        check(0, 1)
        assert objective.num_graphs == 1

    def test_gradients_stay_in_one_place_across_replays(self) -> None:
        model = tiny_model(EXACT).train()
        objective, places = accelerate(model), []
        for lengths in ([24_000, 16_007], [60_000, 50_000]) * 3:
            model.zero_grad(set_to_none=True)
            objective.gradients(batch_of(lengths))
            places.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        assert objective.num_graphs == 2
        assert places[2] == places[3] == places[4] == places[5]

    def test_unreached_parameters_keep_no_gradient(self) -> None:
        model = tiny_model({**EXACT, "quantizer.freeze": False}).train()
        objective = accelerate(model)
        for adds in (False, False, True):
            objective.gradients(batch_of([24_000, 16_007]), adds=adds)
            without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
            assert without == ["quantizer.codebooks", "quantizer.proj.weight"]
        assert objective.num_graphs == 2

    def test_samples_of_a_longer_batch_do_not_stay_behind(self) -> None:
        model = tiny_model({**EXACT, "encoder.conv_norm_type": "layer_norm"}).train()
        objective = accelerate(model)
        for lengths in ([24_000, 24_000], [24_000, 24_000], [23_500, 23_500]):
            objective.gradients(batch_of(lengths))
        assert objective._graphs is not None
        graph = objective._graphs.find(2, Padding.of(model).size(24_000), False)
        assert graph is not None
        assert not graph.batch[0][:, 23_500:].any()
        assert int(graph.num_samples) == 23_500

    def test_a_step_that_cannot_be_captured_runs_without_and_is_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def record(run: Callable[[], MaskedPrediction], pool: Any) -> None:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(graphs, "record", record)
        monkeypatch.setattr(engine, "decide", lambda model, mode, cast, no_graphs: engine.Plan(True, not no_graphs))
        model = tiny_model(EXACT).train()
        objective, batch = accelerate(model), batch_of([24_000, 16_007])
        for _ in range(3):
            objective.gradients(batch)
        assert objective.num_graphs == 0
        assert sum("could not be captured (no room)" in message for message in caplog.messages) == 1
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

    def test_evaluation_and_other_sizes_are_not_captured(self) -> None:
        model = tiny_model(EXACT).train()
        audio, length, noisy, _ = batch_of([24_000, 16_007])
        objective = accelerate(model)
        for _ in range(3):
            objective.gradients((audio, length, torch.nn.functional.pad(noisy, (0, 999)), length))
            objective.gradients((audio, length, noisy, length), scaler=torch.amp.GradScaler("cpu"))
        model.eval()
        for _ in range(3):
            objective.gradients((audio, length, noisy, length))
        assert objective.num_graphs == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnAGpu:
    def steps(self, objective: Objective, batches: list[Batch], **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        losses = [objective.gradients(batch, **options).loss.clone() for batch in batches]
        return torch.stack(losses), gradients_of(objective.model)

    @pytest.mark.parametrize("autocast", [None, torch.bfloat16])
    @pytest.mark.parametrize("overrides", [{}, {"encoder.untie_biases": False}, {"mask_position": "post_conv"}])
    def test_a_replayed_step_repeats_the_uncaptured_one_to_the_bit(
        self, autocast: torch.dtype | None, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With random dropout, dither and masks: the loss, gradients and buffers of the same seed."""
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # the subsampling of post_conv is cuDNN's
        model = tiny_model({"masking.mask_prob": 0.1, **overrides}).cuda().train()
        batch, start = batch_of([24_000, 16_007], "cuda"), copy.deepcopy(model.state_dict())
        objective = accelerate(model, autocast=autocast)
        assert objective.description == "fused layers and CUDA graphs"
        objective.gradients(batch)  # the compiler may pad or autotune in the first step
        runs = []
        for seed in (7, 7, 8, 7):  # captured and replayed; replayed twice more
            model.load_state_dict(start)
            torch.manual_seed(seed)
            loss = objective.gradients(batch, share=0.5).loss.clone()
            runs.append((loss, gradients_of(model), {name: x.clone() for name, x in model.named_buffers()}))
        assert objective.num_graphs == 1
        objective.refresh()
        model.load_state_dict(start)
        torch.manual_seed(7)
        loss = objective.gradients(batch, share=0.5).loss
        assert objective.num_graphs == 0
        gradients, buffers = gradients_of(model), dict(model.named_buffers())
        for found in (runs[0], runs[1], runs[3]):
            assert torch.equal(found[0], loss)
            for name, gradient in gradients.items():
                assert torch.equal(found[1][name], gradient), name
            for name, buffer in buffers.items():
                assert torch.equal(found[2][name], buffer), name
        assert not torch.equal(runs[2][0], loss)

    @pytest.mark.parametrize("autocast", [None, torch.bfloat16])
    def test_gradients_are_added_by_graphs_as_without_them(self, autocast: torch.dtype | None) -> None:
        model = tiny_model(EXACT).cuda().train()
        batches = [batch_of([24_000, 16_007], "cuda", seed) for seed in range(3)]
        start = copy.deepcopy(model.state_dict())

        def update(objective: Objective) -> dict[str, Tensor]:
            model.load_state_dict(start)
            for index, batch in enumerate(batches):
                torch.manual_seed(index)
                objective.gradients(batch, share=1 / 3, adds=index > 0)
            return gradients_of(model)

        uncaptured = Objective(model, "auto", 0.9, autocast, None, memory_share=0.0)  # padded as for graphs
        update(uncaptured)
        wanted = update(uncaptured)
        objective = accelerate(model, autocast=autocast)
        for _ in range(3):
            found = update(objective)
        assert (uncaptured.num_graphs, objective.num_graphs) == (0, 2)  # one replaces, one adds
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), name

    def test_graphs_add_to_what_an_uncaptured_step_left_and_the_other_way_round(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        batch, other = batch_of([24_000, 16_007], "cuda"), batch_of([40_000, 9_000], "cuda")
        objective = accelerate(model)
        for adds in (False, False, True):
            objective.gradients(batch, adds=adds)
        assert objective.num_graphs == 2
        objective.gradients(batch)
        once = gradients_of(model)
        objective.gradients(other)  # uncaptured: a new shape replaces the graphs' gradients
        others = gradients_of(model)
        objective.gradients(batch, adds=True)  # replayed, on top of an uncaptured step
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, once[name] + others[name], atol=1e-4, rtol=1e-3, msg=name)
        objective.gradients(batch)
        objective.refresh()
        objective.gradients(other, adds=True)  # uncaptured, on top of a replay
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, once[name] + others[name], atol=1e-4, rtol=1e-3, msg=name)
        objective.gradients(batch)  # and replaces it
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, once[name], atol=1e-4, rtol=1e-3, msg=name)

    def test_gradients_stay_in_one_place_across_replays(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        objective = accelerate(model, autocast=torch.bfloat16)
        batches = [batch_of(lengths, "cuda") for lengths in ([24_000, 16_007], [48_000, 30_000])]
        for batch in batches * 2:
            objective.gradients(batch)
        assert objective.num_graphs == 2
        places = []
        for batch in batches * 2:
            model.zero_grad(set_to_none=True)
            objective.gradients(batch)
            places.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        assert places[0] == places[1] == places[2] == places[3]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        objective.gradients(batches[0])
        assert torch.cuda.memory_allocated() == before  # a replay allocates nothing

    def test_plain_fused_and_captured_steps_agree(self) -> None:
        plain = tiny_model(EXACT).cuda().train()
        models = [copy.deepcopy(plain) for _ in range(2)]
        lengths = ([24_000, 16_007], [24_000, 17_000], [23_900, 20_000], [24_000, 16_007])
        batches = [batch_of(list(n), "cuda", seed) for seed, n in enumerate(lengths)]
        wanted = self.steps(accelerate(plain, compile="off"), batches)
        objectives = [accelerate(models[0], no_graphs="fused layers alone"), accelerate(models[1])]
        for objective in objectives:
            losses, gradients = self.steps(objective, batches)
            torch.testing.assert_close(losses, wanted[0], atol=1e-5, rtol=1e-5)
            for name, gradient in wanted[1].items():
                torch.testing.assert_close(gradients[name], gradient, atol=5e-5, rtol=1e-2, msg=name)
            for (name, buffer), other in zip(plain.named_buffers(), objective.model.buffers(), strict=True):
                torch.testing.assert_close(other, buffer, atol=1e-4, rtol=1e-4, msg=name)
        assert [objective.num_graphs for objective in objectives] == [0, 1]

    def test_gradients_accumulate_and_scale(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        objective, batch = accelerate(model), batch_of([24_000, 16_007], "cuda")
        for _ in range(2):
            _, once = self.steps(objective, [batch])
        for number, share in enumerate((1.0, 0.5, 2.0)):
            objective.gradients(batch, share=share, adds=number > 0)
        assert objective.num_graphs == 2
        for name, gradient in once.items():
            torch.testing.assert_close(model.get_parameter(name).grad, 3.5 * gradient, atol=1e-4, rtol=1e-3, msg=name)

    def test_no_step_waits_for_the_device(self) -> None:
        model = tiny_model({"masking.mask_prob": 0.1}).cuda().train()
        objective = accelerate(model, autocast=torch.bfloat16)
        batch, other = batch_of([24_000, 16_007], "cuda"), batch_of([40_000, 30_000], "cuda")
        for _ in range(2):  # compiling and capturing may wait, later steps may not
            objective.gradients(batch, share=0.5)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            objective.gradients(batch)
            objective.gradients(other)  # uncaptured
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert objective.num_graphs == 1

    def test_without_memory_to_spare_no_graph_is_made(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        objective = Objective(model, "auto", 0.9, None, None, memory_share=0.0)
        self.steps(objective, [batch_of([24_000, 16_007], "cuda")] * 3)
        assert objective.num_graphs == 0

    def test_released_graphs_give_their_memory_back_and_can_be_made_again(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        objective, batch = accelerate(model), batch_of([24_000, 16_007], "cuda")
        losses, _ = self.steps(objective, [batch] * 3)
        assert objective.num_graphs == 1
        objective.release()
        assert objective.num_graphs == 0
        again, _ = self.steps(objective, [batch] * 3)
        assert objective.num_graphs == 1
        torch.testing.assert_close(again, losses, atol=1e-4, rtol=1e-4)

    def test_float16_and_audio_of_two_sizes_are_not_captured(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        audio, length, noisy, _ = batch_of([24_000, 16_007], "cuda")
        batch, scaler = (audio, length, noisy, length), torch.amp.GradScaler("cuda")
        half = accelerate(model, autocast=torch.float16)
        for _ in range(3):
            half.gradients(batch, scaler=scaler)
        assert "float16" in half.description
        uneven = accelerate(model)
        for _ in range(3):
            uneven.gradients((audio, length, torch.nn.functional.pad(noisy, (0, 999)), length))
        assert half.num_graphs == uneven.num_graphs == 0

    def test_a_seeded_step_repeats_and_the_next_one_differs(self) -> None:
        model = tiny_model({"encoder.dropout": 0.5}).cuda().train()
        objective, batch = accelerate(model), batch_of([24_000, 16_007], "cuda")
        losses = []
        for seed in (1, 2, 3, 3, 4):
            torch.manual_seed(seed)
            losses.append(float(objective.gradients(batch).loss))
        assert losses[2] == losses[3] != losses[4]

    def test_weights_that_change_are_seen_under_autocast(self) -> None:
        model = tiny_model(EXACT).cuda().train()
        objective, batch = accelerate(model, autocast=torch.bfloat16), batch_of([24_000, 16_007], "cuda")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        losses = []
        for _ in range(8):
            losses.append(float(objective.gradients(batch).loss))
            optimizer.step()
        assert losses[-1] < losses[2] - 0.01

    def test_bf16_loss_curves_are_those_of_the_plain_model(self) -> None:
        def curve(compile: str, seed: int) -> Tensor:
            model = tiny_model({"encoder.d_model": 64, "encoder.n_heads": 4}).cuda().train()
            objective = accelerate(model, compile=compile, autocast=torch.bfloat16)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
            batches = [batch_of([48_000, 40_000, 36_000, 47_000], "cuda", n) for n in range(4)]
            losses = []
            for step in range(200):
                torch.manual_seed(1000 * seed + step)
                losses.append(objective.gradients(batches[step % 4]).loss.clone())
                optimizer.step()
            return torch.stack(losses).view(-1, 40).mean(1).cpu()

        plain, other_seed, fast = curve("off", 1), curve("off", 2), curve("auto", 1)
        noise = float((plain - other_seed).abs().max())
        assert float((fast - plain).abs().max()) < max(3 * noise, 0.05)
        assert fast[-1] < fast[0] - 0.1
