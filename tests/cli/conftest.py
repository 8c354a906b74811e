from tests.training.fixtures import compilation_cache, compiled_folder, corpus, process_environment, tiny_config

__all__ = ["compilation_cache", "compiled_folder", "corpus", "process_environment", "tiny_config"]
