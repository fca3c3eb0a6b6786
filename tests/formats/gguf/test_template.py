"""Chat templates are looked at and never rendered."""

from __future__ import annotations

import pytest

from anyckpt.formats.gguf.template import danger

PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m.content | trim }}{% endfor %}",
    "{%- set ns = namespace(found=false) -%}{{ bos_token }}{{ raise_exception('no') }}",
    "__init__ outside of code is text, and so is os.system",
    "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{{ strftime_now('%d %b') }}",
)
HARMFUL = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
)


@pytest.mark.parametrize("template", PLAIN)
def test_a_template_of_a_conversation_is_safe(template: str) -> None:
    assert danger(template) == ""


@pytest.mark.parametrize("template", HARMFUL)
def test_one_that_reaches_for_python_is_dangerous(template: str) -> None:
    assert danger(template) == "dangerous"


@pytest.mark.parametrize("template", ["{{ x | attr('y') }}", "{{ x['_private'] }}", "{{ x.__foo__ }}"])
def test_one_that_a_sandbox_refuses_is_at_least_unknown(template: str) -> None:
    assert danger(template) == "unknown"
