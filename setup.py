"""What pyproject.toml cannot say: the router's native part, which may be missing."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "pd_router._splice",
            ["router/pd_router/_splice.c"],
            extra_compile_args=["-std=c11", "-D_GNU_SOURCE", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
            # Without a compiler or Python's headers the router passes every event on in Python.
            optional=True,
        )
    ]
)
