"""Owns the call of llama.cpp's conversion program for a model without its vocabulary.

Called as `PYTHON llamacpp_convert.py LLAMA_CPP MODEL GGUF TYPE`, by llamacpp.sh. The program refuses tokenizers that it
does not know, as those of made-up checkpoints are. Engines are given token ids here, so that none is needed.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any


def without_vocabulary(model: Any) -> None:
    """Write, for a tokenizer, only how many tokens there are."""
    model.gguf_writer.add_tokenizer_model("none")
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


def round_to_4_bits(exact: Path, gguf: Path) -> None:
    """Round the matrices of a file to llama.cpp's Q4_0: 4 bits each, with a scale for 32."""
    llama_cpp = importlib.import_module("llama_cpp")
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    if llama_cpp.llama_model_quantize(bytes(exact), bytes(gguf), how) != 0:
        sys.exit(f"llama.cpp could not round {exact}")


def main(sources: Path, model: Path, gguf: Path, kind: str) -> None:
    """Convert the checkpoint `model` to the file `gguf` with weights of a kind: bf16, f16, f32, q8_0 or q4_0."""
    if kind == "q4_0":
        exact = gguf.with_suffix(".bf16.gguf")
        main(sources, model, exact, "bf16")
        round_to_4_bits(exact, gguf)
        exact.unlink()
        return
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    conversion = importlib.import_module("conversion")
    hparams = conversion.ModelBase.load_hparams(model, False)
    architecture = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    conversion.get_model_class(architecture).set_vocab = without_vocabulary
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", str(gguf), "--outtype", kind]
    runpy.run_path(str(sources / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
