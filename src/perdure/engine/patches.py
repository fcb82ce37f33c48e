"""Decide whether a run continues with changed code: the implementation of `step.patched`."""

from perdure.engine.branches import Branch
from perdure.engine.history import History
from perdure.engine.paths import join_path
from perdure.snapshot.patches import Answer, answer_of, encode_answer, patch_name


def is_patched(history: History, branch: Branch, id: str) -> bool:
    """Return this branch's answer, or decide it and keep it for the next write.

    A branch that has recorded work ahead has already passed this place with the old code.
    """
    name = patch_name(join_path(branch.path, id))
    answer = answer_of(history.metadata.get(name))
    if answer is None:
        answer = Answer(not history.is_ahead_of(branch), history.last_record)
        history.set_metadata(name, encode_answer(answer))
    return answer.patched
