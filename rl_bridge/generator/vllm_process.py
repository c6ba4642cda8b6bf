"""What vLLM's worker learns for us in an engine's own process, which imports this before it loads anything.

That process belongs to the one that started it: when its owner is killed, nobody else would end it. So the kernel is
asked to, as soon as this module is imported, which is before the model is loaded.

Nor is a terminal's Ctrl-C for it, which reaches every process of the foreground group: vLLM would have it end the
engine, while its owner, which decides, is still to stop everything in order.
"""

import ctypes
import os
import signal
import sys
import threading

from rl_bridge.generator.handover import Handover, WeightReceiver
from rl_bridge.generator.vllm_api import OWNER_VARIABLE
from rl_bridge.generator.vllm_worker import WeightLoader

SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def end_with_owner() -> None:
    """Have this process killed when the one that started it ends, or at once where it has ended already; not before."""
    owner = int(os.environ[OWNER_VARIABLE])
    if os.getpid() == owner:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != owner:
        os.kill(os.getpid(), signal.SIGKILL)
    if threading.current_thread() is threading.main_thread():  # nobody else may
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if OWNER_VARIABLE in os.environ:
    end_with_owner()


class OwnedWeightLoader(WeightLoader):
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    def load_handed_over(self, handover: Handover) -> None:
        """Replace the weights in place by those that the owner has written down."""
        receiver: WeightReceiver = self.__dict__.setdefault("ropewalk_weight_receiver", WeightReceiver())
        self.load_policy(receiver.read(handover))
