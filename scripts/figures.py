"""Draw a figure of arXiv 2510.04212 from runs, checkpoints or a Llama of Hugging Face: a PNG, and the numbers drawn as CSV.

    python scripts/figures.py 11 --runs runs/failing runs/fixed
    python scripts/figures.py 5 --checkpoint runs/failing/checkpoints/step_00005000
    python scripts/figures.py 9 --hf FOLDER --text "The quick brown fox jumps over the lazy dog"

    4   P K, X and their outer products at two tokens, or at one of each of two checkpoints
    5   error of delta: summed, and by feature
    8   as 4, at the last token of each text that a Llama reads
    9   rows of a Llama's attention whose maximum several keys share
    11  spectral norms over layers and steps
    13  repeated maxima before the explosion

4 and 5 need --checkpoint, 8 and 9 --hf, 11 and 13 --runs with telemetry. Layers, heads, tokens and features count from 0; the paper's
layer 2 is layer 1 here, its head 8 is head 7.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import _root  # noqa: F401

from errors import OneLineParser, UserError, check_size, exit_on_user_error, invalid, on_disk, trainer_packages

with trainer_packages():
    import torch

    from figures import canvas, delta, inputs, over_steps, pretrained, similarity
    from figures.canvas import Drawn


def _figure_4(args: argparse.Namespace) -> Drawn:
    if len(args.checkpoint) > 2:
        raise invalid("--checkpoint", " ".join(map(str, args.checkpoint)), "one or two for figure 4")
    if len(args.checkpoint) == 1 and args.sequences < 2:
        raise invalid("--sequences", args.sequences, "2 or more, as figure 4 draws two of one checkpoint's")
    checkpoints = [inputs.open_checkpoint(folder, _device()) for folder in args.checkpoint]
    if any(opened.config.model.qk_norm for opened in checkpoints):
        raise invalid("model.qk_norm", True, "False, as figure 4's P K is not pulled back through QK-norm")
    shapes = {(opened.config.model.n_embd, opened.config.model.n_head) for opened in checkpoints}
    if len(shapes) > 1:
        raise UserError(f"figure 4 compares checkpoints of one width and number of heads, not {sorted(shapes)}")
    rows = []
    for opened in checkpoints:
        (layer,), _ = inputs.captured(opened, args.sequences, args.data, [args.layer])
        head = _head(checkpoints[0], args)
        # One checkpoint: two of its sequences. Two: the same sequence in each.
        for batch in (0,) if len(checkpoints) > 1 else (0, args.sequences - 1):
            _, token = delta.largest_error(layer, head, batch)
            source, label = opened.label, f"{opened.label}, layer {args.layer} head {head}, sequence {batch}"
            rows.append(similarity.rank_one(layer, head=head, batch=batch, token=token, source=source, label=label))
    return similarity.draw_similarity(rows)


def _figure_5(args: argparse.Namespace) -> Drawn:
    opened = inputs.open_checkpoint(args.checkpoint[0], _device())
    (layer,), scale = inputs.captured(opened, args.sequences, args.data, [args.layer])
    head = _head(opened, args)
    batch, token = delta.largest_error(layer, head)
    label = f"{opened.label}, layer {args.layer} head {head}"
    error = delta.head_error(layer, head=head, batch=batch, token=token, label=label, loss_scale=scale)
    return delta.draw_delta(error)


def _head(opened: inputs.Opened, args: argparse.Namespace) -> int:
    return inputs.head_of(opened.model.w_q(args.layer), opened.config.model.n_head, args.head)


def _figure_8(args: argparse.Namespace) -> Drawn:
    llama = pretrained.Llama(args.hf, _device())
    return similarity.draw_similarity([llama.rank_one(text, args.layer, args.head) for text in args.text])


def _figure_9(args: argparse.Namespace) -> Drawn:
    llama = pretrained.Llama(args.hf, _device())
    return pretrained.draw_rows(llama.repeated_maxima(args.text), llama.name)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


REGISTRY: dict[int, Callable[[argparse.Namespace], Drawn]] = {
    4: _figure_4,
    5: _figure_5,
    8: _figure_8,
    9: _figure_9,
    11: lambda args: over_steps.draw_norms([inputs.load_run(folder) for folder in args.runs]),
    13: lambda args: over_steps.draw_ties([inputs.load_run(folder) for folder in args.runs]),
}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("figure", type=int, choices=REGISTRY)
    parser.add_argument("--runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    where = "as runs/NAME/checkpoints/step_00005000, or a run (its newest)"
    parser.add_argument("--checkpoint", nargs="+", type=Path, metavar="DIR", help=where)
    parser.add_argument("--hf", type=Path, metavar="FOLDER", help="a LlamaForCausalLM and its tokenizer, as saved")
    texts = ["The quick brown fox jumps over the lazy dog", "Pack my box with five dozen liquor jugs"]
    parser.add_argument("--text", nargs="+", default=texts, help="what it reads, one by one (two pangrams)")
    parser.add_argument("--data", type=Path, help="data set to take sequences from (that of the checkpoint's run)")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of the validation tokens to read (8)")
    parser.add_argument("--layer", type=int, default=1, help="which layer (1, the paper's layer 2)")
    parser.add_argument("--head", type=int, help="which head (the one whose W_Q has the largest spectral norm)")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder to write to (pictures)")
    args = parser.parse_args(argv)
    check_size("--sequences", args.sequences, 1)
    is_picture = args.out.suffix in (".png", ".pdf", ".svg", ".csv")  # as compare_runs.py has it
    if is_picture or (args.out.exists() and not args.out.is_dir()):
        raise invalid("--out", str(args.out), "a folder")
    needed = {4: "checkpoint", 5: "checkpoint", 8: "hf", 9: "hf"}.get(args.figure, "runs")
    if not getattr(args, needed):
        raise UserError(f"figure {args.figure} needs --{needed}")
    drawn = REGISTRY[args.figure](args)
    with on_disk(f"--out {args.out}", "be written"):
        paths = canvas.write(drawn, args.out, f"figure_{args.figure:02d}")
    print(*paths)


if __name__ == "__main__":
    main()
