"""dad's elastic states under Horovod's name, for scripts and libraries that derive from them."""

from dad.elastic.notification import notification_manager
from dad.elastic.run import run_fn
from dad.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
