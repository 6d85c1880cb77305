#!/usr/bin/env python
"""Owns the command that makes the tiny trained checkpoints of test/models."""

import argparse
import random
from pathlib import Path

import torch

from tiny_models.corpus import collect_subjects, make_samples
from tiny_models.families import FAMILIES, build_model, save_checkpoint
from tiny_models.report import print_report
from tiny_models.training import TrainingPlan, train
from tiny_models.vocabulary import encode_samples, train_tokenizer

EPILOG = """\
The text is the documentation that comes with the Python running this script (docstrings of the standard
library and the language topics of `help()`), as documents and as short conversations. Another Python version
gives other text and so other weights. All families share one tokenizer, trained on the same text.

The learning rate falls along the schedule, so a run that --minutes ends early is still a finished run.

examples:
  python scripts/make_tiny_models.py
      all models into test/models, about an hour on two quiet cores
  python scripts/make_tiny_models.py --family mixtral --threads 1
      one of them; two such runs beside each other share a busy machine better than one with two threads
  python scripts/make_tiny_models.py --minutes 1 --output /tmp/models
      barely trained, to try a change of this script

A directory is replaced only when its new checkpoint is complete. Afterwards copy the printed measures into
test/models/README.md.
"""


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Make tiny but trained MoE checkpoints (Qwen3-MoE, Mixtral, DeepSeek-V3) in Hugging Face format.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default_output = Path(__file__).resolve().parent.parent / "test" / "models"
    parser.add_argument("--output", type=Path, default=default_output, help="parent folder of tiny-FAMILY")
    parser.add_argument("--family", choices=[*FAMILIES, "all"], default="all", help="default: all")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps per model; default: 1500")
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="wall limit per model; default: 60",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, samples and order; default: 0")
    parser.add_argument("--vocab-size", type=int, default=3072, help="tokenizer entries; default: 3072")
    parser.add_argument("--threads", type=int, default=2, help="of torch, on the CPU; default: 2")
    return parser.parse_args()


def main() -> None:
    """Make the text, the tokenizer, and then each model."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    subjects = collect_subjects()
    rng = random.Random(arguments.seed)
    train_samples = make_samples([s for s in subjects if not s.held_out], rng)
    held_out_samples = make_samples([s for s in subjects if s.held_out], rng)
    documents = [sample.document for sample in train_samples if sample.document]
    tokenizer = train_tokenizer(documents, arguments.vocab_size)
    train_ids = encode_samples(tokenizer, train_samples)
    held_out_ids = encode_samples(tokenizer, held_out_samples)
    num_tokens = sum(map(len, train_ids))
    print(f"{len(subjects)} subjects, {len(train_ids)} samples, {num_tokens} tokens an epoch", flush=True)
    plan = TrainingPlan(num_steps=arguments.steps, limit_s=arguments.minutes * 60.0, seed=arguments.seed)
    for family in FAMILIES if arguments.family == "all" else (arguments.family,):
        path = arguments.output / f"tiny-{family}"
        torch.manual_seed(arguments.seed)
        model = build_model(family, tokenizer)
        print(f"\n{path.name}: {sum(p.numel() for p in model.parameters())} parameters", flush=True)
        train_loss = train(model, train_ids, plan)
        save_checkpoint(model, tokenizer, family, path)
        print_report(path, held_out_ids, train_loss)


if __name__ == "__main__":
    main()
