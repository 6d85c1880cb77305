"""Owns the class that Ray Data makes in each actor: batches of rows in, the same batches with answers out.

`Dataset.map_batches` takes it as it is, and the processor uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from sgl_batch.control_plane.data.batches import rows_of, with_answers
from sgl_batch.control_plane.data.cpu_share import CpuShare, share_of_actor
from sgl_batch.control_plane.data.engine_thread import EngineThread, RunningEngine
from sgl_batch.control_plane.data.row_engine import RowEngine
from sgl_batch.control_plane.data.row_requests import ERROR, RowAnswer, RowRequest, read_row
from sgl_batch.errors import RequestError


class SglBatchPredictor:
    """Answers batches with an engine of its own, which starts with the first batch and ends with this object.

    Columns that are read: `prompt` (text), `messages` (a conversation, for the model's chat template) or
    `tokenized_prompt` (ids of tokens), and `sampling_params` (SGLang's, by name). Columns that are added:
    generated_text, generated_tokens, num_input_tokens, num_generated_tokens, and `__inference_error__`, which is empty
    for a row that was answered. Rows keep their order, and all other columns.

    Args:
        model_source: The model's directory on each node, or its name on the hub.
        engine_kwargs: Further arguments of `sgl_batch.Engine`.
        sampling_params: Sampling parameters for all rows. A row's own come before them.
        chat_template_kwargs: Arguments of the model's chat template.
        should_continue_on_error: Whether a row that cannot be answered gets an error; without it, it ends the run.
    """

    def __init__(
        self,
        model_source: str,
        engine_kwargs: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        should_continue_on_error: bool = True,
    ) -> None:
        self._arguments = {**(engine_kwargs or {}), "model_path": model_source}
        self._sampling = dict(sampling_params or {})
        self._chat_template = dict(chat_template_kwargs or {})
        self._continues = should_continue_on_error
        self._share: CpuShare | None = None
        self._engine = RowEngine(self._new_engine)

    async def __call__(self, batch: Any) -> Any:
        """Return the batch, a pyarrow.Table or a dict of numpy arrays, with its answers.

        Raises:
            ConfigError: The engine cannot start with its arguments, or the batch is of another kind.
            EngineError: The engine does not start, or dies again and again.
            RequestError: A row cannot be answered, and the run is to end then.
        """
        read = [self._read(row) for row in rows_of(batch)]
        asked = [one for one in read if isinstance(one, RowRequest)]
        found = iter(await self._engine.answers(asked))
        answers = [next(found) if isinstance(one, RowRequest) else one for one in read]
        if not self._continues:
            for answer in answers:
                if answer.error:
                    raise RequestError(code="row_failed", message=answer.error)
        return with_answers(batch, answers)

    def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        self._engine.close()
        if self._share is not None:
            self._share.release()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self.close()

    def _read(self, row: Mapping[str, Any]) -> RowRequest | RowAnswer:
        """Return a row's request, or its error, which may be one of an earlier stage."""
        if row.get(ERROR):
            return RowAnswer(error=str(row[ERROR]))
        try:
            return read_row(row, self._sampling)
        except RequestError as refused:
            return RowAnswer(error=refused.message)

    def _new_engine(self) -> EngineThread:
        assigned = ray.get_runtime_context().get_assigned_resources() if ray.is_initialized() else None
        if self._share is None and assigned is not None:
            self._share = share_of_actor(assigned)
        return EngineThread(self._make, self._chat_template)

    def _make(self) -> RunningEngine:
        """Make the engine, in its own thread."""
        from sgl_batch import Engine

        if self._share is not None:
            self._share.bind()
        engine: RunningEngine = Engine(**self._arguments)
        return engine
