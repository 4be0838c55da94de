"""A layer of one's own, which sees earlier tokens, is verified under a schedule that cuts sequences; a mistake is named."""

from __future__ import annotations

import pytest

from uses import Use


def test_a_layer_is_verified_and_a_mistake_is_named(use: Use) -> None:
    program = use.code("own_model.md", "class Decay(nn.Module)")
    assert use.python("decay.py", program) == ""
    wrong = program.replace("earlier[-1][0] if earlier else ", "")
    assert wrong != program
    with pytest.raises(AssertionError, match=r"layer 'decay0'.*where sequences are cut, a token sees the earlier"):
        use.python("wrong.py", wrong)
    assert use.pages == ["own_model.md"]
