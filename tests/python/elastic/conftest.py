from elastic_job import start  # noqa: F401  a fixture
