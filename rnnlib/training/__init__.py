"""Training: configs, optimizer, loop, evaluation, checkpoints, metrics."""

from rnnlib.configuration import ConfigError, from_plain, to_plain
from rnnlib.extras import from_extra

with from_extra("train", "rnnlib.training"):
    from rnnlib.training.accuracy import TaskEvaluation, evaluate_lengths, evaluate_task
    from rnnlib.training.auto_remat import RematChoice, choose_remat
    from rnnlib.training.batches import put_batch
    from rnnlib.training.checkpoint import CheckpointError, Checkpoints, Progress
    from rnnlib.training.config import CheckpointConfig, EvaluationConfig, LoggingConfig, TrainConfig
    from rnnlib.training.config_file import load_config, save_config
    from rnnlib.training.distributed import (
        DistributedConfig,
        DistributedError,
        broadcast_from_primary,
        ending_together,
        is_primary,
        join_processes,
        launch_arguments,
    )
    from rnnlib.training.evaluation import Evaluation, evaluate, spread_batches
    from rnnlib.training.flops import step_flops
    from rnnlib.training.hooks import Hook
    from rnnlib.training.loading import LoadedModel, folder_model_config, is_run, load_model
    from rnnlib.training.loggers import Logger
    from rnnlib.training.loss import LossSums, bits_per_byte, head_loss_sums, loss_sums
    from rnnlib.training.memory import keep_freed_memory, planned_bytes
    from rnnlib.training.mesh import MeshConfig, make_mesh
    from rnnlib.training.metrics import read_csv
    from rnnlib.training.optimizer import OptimizerConfig, decay_mask, learning_rate_schedule, make_optimizer
    from rnnlib.training.plan import Exchange, StepPlan, abstract_train_state, plan_step
    from rnnlib.training.plots import plot_losses
    from rnnlib.training.progress import ProgressReporter
    from rnnlib.training.reports import EvaluationReport, NonFiniteLossError, StepReport, TrainResult
    from rnnlib.training.run import (
        LoadedRun,
        RunError,
        check_new_folder,
        check_own_files,
        load_run,
        load_run_chat,
        load_run_config,
        load_run_tokenizer,
        next_run_folder,
        split_step,
    )
    from rnnlib.training.step import (
        StepMetrics,
        TrainState,
        init_train_state,
        make_evaluation_step,
        make_train_step,
        put_state,
    )
    from rnnlib.training.trainer import Trainer, train

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Checkpoints",
    "ConfigError",
    "DistributedConfig",
    "DistributedError",
    "Evaluation",
    "EvaluationConfig",
    "EvaluationReport",
    "Exchange",
    "Hook",
    "LoadedModel",
    "LoadedRun",
    "Logger",
    "LoggingConfig",
    "LossSums",
    "MeshConfig",
    "NonFiniteLossError",
    "OptimizerConfig",
    "Progress",
    "ProgressReporter",
    "RematChoice",
    "RunError",
    "StepMetrics",
    "StepPlan",
    "StepReport",
    "TaskEvaluation",
    "TrainConfig",
    "TrainResult",
    "TrainState",
    "Trainer",
    "abstract_train_state",
    "bits_per_byte",
    "broadcast_from_primary",
    "check_new_folder",
    "check_own_files",
    "choose_remat",
    "decay_mask",
    "ending_together",
    "evaluate",
    "evaluate_lengths",
    "evaluate_task",
    "folder_model_config",
    "from_plain",
    "head_loss_sums",
    "init_train_state",
    "is_primary",
    "is_run",
    "join_processes",
    "keep_freed_memory",
    "launch_arguments",
    "learning_rate_schedule",
    "load_config",
    "load_model",
    "load_run",
    "load_run_chat",
    "load_run_config",
    "load_run_tokenizer",
    "loss_sums",
    "make_evaluation_step",
    "make_mesh",
    "make_optimizer",
    "make_train_step",
    "next_run_folder",
    "plan_step",
    "planned_bytes",
    "plot_losses",
    "put_batch",
    "put_state",
    "read_csv",
    "save_config",
    "split_step",
    "spread_batches",
    "step_flops",
    "to_plain",
    "train",
]
