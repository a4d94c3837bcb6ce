"""What pyproject.toml cannot say: an editable install too may lack the extension."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildWhatCompiles(build_ext):
    """Leaves out of an editable install the optional extensions that did not compile."""

    def get_output_mapping(self) -> dict[str, str]:
        mapping = super().get_output_mapping()
        return {built: kept for built, kept in mapping.items() if Path(kept).exists()}


setup(cmdclass={"build_ext": BuildWhatCompiles})
