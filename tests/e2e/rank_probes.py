"""Ranks of a probe program, as processes of their own, and what each of them said at its end."""
import os
import signal
import socket
import subprocess


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class RankProbes:
    """For test cases."""

    def run_probes(self, command, world, stopped=None, **variables):
        """{rank: (exit code, last line, all lines)} of those that are not stopped. `variables`: of the environment, of every rank."""
        shared = {"WORLD_SIZE": str(world), "MASTER_PORT": str(free_port()), **{name: str(value) for name, value in variables.items()}}
        ranks = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
                 for rank in range(world)]
        try:
            out = {}
            for rank, process in enumerate(ranks):
                if rank != stopped:
                    _, text = process.communicate(timeout=120)
                    out[rank] = (process.returncode, text.splitlines()[-1] if text else "", text)
            return out
        finally:
            for process in ranks:
                process.send_signal(signal.SIGKILL)
                process.wait()
                process.stderr.close()

    def all_say(self, ranks, *texts, code=2):
        for rank, (got, line, everything) in ranks.items():
            for text in texts:
                self.assertIn(text, line, (rank, everything))
            self.assertEqual(got, code, (rank, everything))
