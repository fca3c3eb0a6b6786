"""What a format's tests inherit, here and in other packages: `FormatTests`. Needs pytest, which is not installed along.

    class TestMyFormat(FormatTests):
        row = "my-format"

        def example(self, tmp_path): ...     # write a small checkpoint of the format, return its path
"""

from anyckpt.testing.suite import FormatTests

__all__ = ["FormatTests"]
