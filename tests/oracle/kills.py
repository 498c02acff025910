"""A command that is killed again and again, for the tests of going on."""
import random
import signal
import subprocess


def kill_often(command, cwd, took, times, seed, shortest=0.1, longest=0.6):
    """Starts the command up to `times` times and kills it after a random part of the seconds that it takes undisturbed. Ends when it comes
    to its end by itself. At least one start is killed."""
    draw = random.Random(seed)
    for kills in range(times):
        process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=draw.uniform(shortest, longest) * took)
            assert process.returncode == 0 and kills > 0
            return
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
