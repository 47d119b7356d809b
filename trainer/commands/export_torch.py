"""`foreload export --format torch`: write a model that can be called.

The folder needs neither foreload nor the model's class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foreload.base.errors import SettingError
from foreload.trainer.checkpoints.saved_checkpoint import names_checkpoint, open_model
from foreload.trainer.commands.export import contents_of, dense_files, state_with
from foreload.trainer.serving.format import check_new, new_folder, same_model
from foreload.trainer.serving.torch_folder import TorchOptions, write_folder


def run(
    path: str, store: str | None, out: str, options: TorchOptions, schedule: str | None = None, accept_model: bool = False
) -> dict[str, Any]:
    """Write the folder `out`, whole or not at all.

    Args:
        path: the folder of a run, or of a checkpoint.
        store: the URLs of the run's servers. If None, the run's own.
        schedule: the folder where a checkpoint's schedule is now.
        accept_model: whether the model's code may differ from the code that it was trained with.

    Returns:
        The contents of the folder's features.json.

    Raises:
        SettingError: the options do not go together.
        ExportError: `out` exists or cannot be written, or the model's forward cannot be traced.
    """
    target, options = check_new(out), _checked(options)
    with open_model(path, store, schedule, accept_model) as model:
        if not names_checkpoint(path):
            model.check_code()
        contents = contents_of(model)
        of_model = {"step": contents["step"], **same_model(contents), "state": state_with(contents, dense_files(model))}
        with new_folder(target) as folder:
            return write_folder(model, folder, of_model, options)


def _checked(options: TorchOptions) -> TorchOptions:
    """Check that the options go together, and return them without the server's password.

    Raises:
        SettingError: the options do not go together.
        ExportError: ONNX is asked for and cannot be written.
    """
    if options.most_rows is not None and options.most_rows < 0:
        raise SettingError(f"--most-rows: must be at least 0; got {options.most_rows}")
    if options.onnx:
        from foreload.trainer.serving.dense_program import check_onnx

        if not options.program:
            raise SettingError("--onnx: is made from the program of the dense part; give it without --dense weights")
        check_onnx()
    if options.rows_at is None:
        if options.key is not None:
            raise SettingError("--key: is for --rows-at; leave it out")
        return options
    from foreload.cache.client.url import parse_url
    from foreload.trainer.serving.redis_keys import Keys

    if options.most_rows is None:
        raise SettingError("--rows-at: is for tables with more rows than --most-rows; give that too, 0 for all tables")
    if options.key is None:
        raise SettingError(
            "--key: is missing: the pattern of the keys at --rows-at, as given to `foreload apply --key`, such as 'emb:{table}:{id}'"
        )
    Keys(options.key)
    return replace(options, rows_at=parse_url(options.rows_at).plain)
