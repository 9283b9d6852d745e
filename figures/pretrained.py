"""Figures 8 and 9, of a Llama in a Hugging Face folder: Figure 4 for some texts, and rows that reach their maximum more than once.

Legend: T positions, H heads, D head width, C width, S keys.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from attention.check.captured import Inputs, capture
from attention.rounding import round_to
from attention.watching.measure import score_rows
from errors import UserError, check_finite, invalid, reading
from figures import canvas
from figures.canvas import Drawn
from figures.inputs import head_of
from figures.similarity import RankOne
from probes.low_rank import coherence

SHORTEST = 5
"""Tokens of a text."""
FIRST_QUERY, ROWS = 3, 6


class Row(NamedTuple):
    text: int
    layer: int
    head: int
    query: int
    p_S: Tensor
    """Probabilities, float32."""
    top_S: Tensor
    """bool: which scores are the row's maximum in BF16."""


class Llama:
    """A folder of ``LlamaForCausalLM.save_pretrained`` with its tokenizer. Raises ``UserError`` for any other, and for pickled weights."""

    def __init__(self, folder: Path, device: torch.device):
        try:
            from transformers import AutoTokenizer, LlamaForCausalLM
        except ModuleNotFoundError as missing:
            raise UserError(f"--hf needs the package {missing.name}: pip install 'transformers>=4.56'") from None
        with reading(f"--hf {folder}"):
            kind = json.loads((folder / "config.json").read_text()).get("model_type")
            if kind != "llama":
                raise invalid(f"--hf {folder}: model_type", kind, "llama")
            only: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            how: dict[str, Any] = {"use_safetensors": True, "dtype": "auto", "attn_implementation": "sdpa"}
            loaded: Any = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, **only, **how)
            self._model, found = loaded
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **only)
        if found["missing_keys"]:
            raise UserError(f"--hf {folder}: it has no weights for {', '.join(sorted(found['missing_keys']))}")
        check_finite(self._model.state_dict().items(), f"--hf {folder}")
        self._model.to(device).requires_grad_(False)
        self._model.get_input_embeddings().requires_grad_()  # dO alone is asked for; this gives it a graph
        self.name, self.layers = folder.resolve().name, len(self._model.model.layers)

    def _look(self, text: str, layers: Sequence[int]) -> dict[int, Inputs]:
        """Attention's inputs by layer, batch 1, on the CPU. Raises ``UserError`` for a short text."""
        tokens = torch.tensor([self._tokenizer(text)["input_ids"]], device=self._model.device)
        if tokens.shape[1] < SHORTEST or tokens.max() >= self._model.config.vocab_size:
            raise invalid("--text", text, f"{SHORTEST} or more tokens of the model's vocabulary")
        with capture(self._model, layers) as calls:
            self._model(input_ids=tokens, labels=tokens).loss.backward()
        return calls

    def rank_one(self, text: str, layer: int, head: int | None) -> RankOne:
        """What Figure 4 shows, at the text's last token. Raises ``UserError`` for a layer or head that is not there, or a short text."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        if not 0 <= layer < self.layers:
            raise invalid("--layer", layer, f"0 to {self.layers - 1}")
        w_q, inputs = self._model.model.layers[layer].self_attn.q_proj, []
        head = head_of(w_q.weight.float(), self._model.config.num_attention_heads, head)
        hook = w_q.register_forward_pre_hook(lambda _, read: inputs.append(read[0].detach()))
        call, x_BTC = self._look(text, [layer])[layer], inputs[0]
        hook.remove()
        pk_BHTD = _scores(call).softmax(dim=-1) @ _keys(call).float()
        positions = torch.arange(x_BTC.shape[1], device=x_BTC.device)[None]
        cos, sin = (table.cpu() for table in self._model.model.rotary_emb(x_BTC, positions))
        pk_BHTD, _ = apply_rotary_pos_emb(pk_BHTD, pk_BHTD, cos, -sin)  # as dW_Q has it: turned back
        x_BTC = x_BTC.float().cpu()
        return RankOne(
            source=text,
            label=f"{self.name}, layer {layer} head {head}: {text}",
            head=head,
            token=x_BTC.shape[1] - 1,
            pk_TD=pk_BHTD[0, head],
            x_TC=x_BTC[0],
            coherence=coherence(pk_BHTD, x_BTC),
        )

    def repeated_maxima(self, texts: Sequence[str]) -> list[Row]:
        """Rows with the most probability at a maximum that several scores share in BF16, one of each head; those without one come last."""
        rows: dict[tuple[int, int], tuple[bool, float, Row]] = {}
        for number, text in enumerate(texts):
            for layer, call in self._look(text, range(self.layers)).items():
                s_HTS = _scores(call)[0]
                p_HTS, rounded_HTS = s_HTS.softmax(dim=-1), round_to(s_HTS, "bf16")
                top_HTS = rounded_HTS == rounded_HTS.amax(dim=-1, keepdim=True)
                mass_HT, shared_HT = (p_HTS * top_HTS).sum(dim=-1), top_HTS.sum(dim=-1) > 1
                best_H = (mass_HT + shared_HT)[:, FIRST_QUERY:].argmax(dim=-1) + FIRST_QUERY
                for head, query in enumerate(best_H.tolist()):
                    at = head, query, slice(query + 1)
                    row = Row(number, layer, head, query, p_HTS[at], top_HTS[at])
                    entry = bool(shared_HT[head, query]), float(mass_HT[head, query]), row
                    rows[layer, head] = max(entry, rows.get((layer, head), entry), key=lambda entry: entry[:2])
        return [row for *_, row in sorted(rows.values(), key=lambda entry: entry[:2], reverse=True)]


def _keys(call: Inputs) -> Tensor:
    """Keys of every head of queries, [1, H, T, D]."""
    return call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)


def _scores(call: Inputs) -> Tensor:
    """S [1, H, T, S], float32; -inf where a key is not seen."""
    q_BTHD, k_BTHD = call.q.transpose(1, 2), _keys(call).transpose(1, 2)
    ((_, s_BHTS),) = score_rows(q_BTHD, k_BTHD, scale=call.scale, chunk=q_BTHD.shape[1])
    return s_BHTS


def draw_rows(rows: Sequence[Row], label: str) -> Drawn:
    """Figure 9: probabilities of the first ``ROWS`` rows; orange where the score is the row's maximum in BF16. The table has all."""
    figure = canvas.sheet(4.0)
    grid = figure.subplots(ROWS // 2, 2).ravel()
    for axes in grid[len(rows) :]:
        axes.set_visible(False)
    for axes, row in zip(grid, rows, strict=False):
        colors = [canvas.ORANGE if top else canvas.BLUE for top in row.top_S]
        axes.bar(range(len(row.p_S)), row.p_S.numpy(), color=colors)
        axes.xaxis.get_major_locator().set_params(integer=True)
        at = f"layer {row.layer} head {row.head}, text {row.text} query {row.query}"
        canvas.style_axes(axes, title=f"{at}\nkeys at the maximum: {int(row.top_S.sum())}")
    shared = sum(int(row.top_S.sum() > 1) for row in rows)
    title = f"{label}: {shared} of {len(rows)} heads have a row whose maximum is shared"
    figure.suptitle(canvas.wrapped(title), fontsize=canvas.SMALL)
    figure.supxlabel("key", fontsize=canvas.TEXT)
    figure.supylabel("probability", fontsize=canvas.TEXT)
    table = pd.DataFrame(
        [
            (*row[:4], key, float(p), bool(top))
            for row in rows
            for key, (p, top) in enumerate(zip(*row[4:], strict=True))
        ],
        columns=["text", "layer", "head", "query", "key", "probability", "at_maximum"],
    )
    return Drawn(figure, table)
