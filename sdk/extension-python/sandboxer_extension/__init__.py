"""Write an extension of sandboxer: subclass SandboxExtension, fill in its hooks, call main().

The server starts the program once for each call, with one JSON object on its standard input, and reads one from its standard output.
This module does that; what a hook prints goes to the server's log.
"""

import json
import os
import sys

__all__ = ["ExtensionError", "SandboxExtension"]

PROTOCOL = 1


class ExtensionError(Exception):
    """Why something was not done. code is one of: invalid, conflict, not_found, unsupported, unavailable, failed."""

    def __init__(self, message, code="failed"):
        super().__init__(message)
        self.code = code


class SandboxExtension:
    """One kind of sandbox. Every hook may be called at any time, in a process of its own: keep nothing in memory.

    While a hook runs, self.sandbox_id, self.snapshot_id and self.metadata say what it is about. The working directory is the extension's own and
    is kept. Hooks return dictionaries of strings, which are given back to later hooks as `handle` and `snapshot_meta`.
    """

    name = ""

    sandbox_id = None
    snapshot_id = None
    metadata = {}

    def validate(self, profile, inputs, host):
        """Raise ExtensionError(..., "invalid") if a sandbox can't be made of this."""

    def provision(self, profile, inputs, host):
        """Make the sandbox self.sandbox_id; return its handle when it is ready."""
        raise NotImplementedError

    def status(self, handle):
        """Return "ready", "provisioning", "gone" or ("failed", "why")."""
        raise NotImplementedError

    def teardown(self, handle):
        """Remove the sandbox self.sandbox_id. Also one that was half-made (an empty handle), and one that is not there."""
        raise NotImplementedError

    def supports_snapshots(self) -> bool:
        return False

    def snapshot(self, handle) -> dict:
        """Save the state of the sandbox, which goes on, as self.snapshot_id."""
        raise ExtensionError("This extension makes no snapshots.", "unsupported")

    def restore_from_snapshot(self, profile, snapshot_meta, inputs, host) -> dict:
        """Make the sandbox self.sandbox_id from the snapshot self.snapshot_id; return its handle."""
        raise ExtensionError("This extension makes no snapshots.", "unsupported")

    def delete_snapshot(self, snapshot_meta, host):
        """Remove what the snapshot self.snapshot_id left. Also one that is not there."""

    def _call(self, method, params):
        self.sandbox_id = params.get("sandbox_id")
        self.snapshot_id = params.get("snapshot_id")
        self.metadata = params.get("metadata") or {}
        profile, inputs, host = params.get("profile"), params.get("inputs") or {}, params.get("host")
        handle, meta = params.get("handle") or {}, params.get("snapshot_meta") or {}
        if method == "describe":
            return {"name": self.name, "protocol": PROTOCOL, "supports_snapshots": bool(self.supports_snapshots())}
        if method == "validate":
            return self.validate(profile, inputs, host) or {}
        if method == "provision":
            return self.provision(profile, inputs, host)
        if method == "status":
            status = self.status(handle)
            return {"status": status[0], "message": status[1]} if isinstance(status, tuple) else {"status": status}
        if method == "teardown":
            return self.teardown(handle) or {}
        if method == "snapshot":
            return self.snapshot(handle)
        if method == "restore_from_snapshot":
            return self.restore_from_snapshot(profile, meta, inputs, host)
        if method == "delete_snapshot":
            return self.delete_snapshot(meta, host) or {}
        raise ExtensionError(f"there is no method {method}", "unsupported")

    def main(self):
        """Answer the one call that this process was started for."""
        answers = os.dup(1)
        # What a hook or a program that it starts prints is not the answer.
        os.dup2(2, 1)
        request = json.load(sys.stdin)
        params = request.get("params") or {}
        answer = {"id": request["id"], "sandbox_id": params.get("sandbox_id"), "snapshot_id": params.get("snapshot_id")}
        try:
            answer["result"] = self._call(request["method"], params)
        except ExtensionError as error:
            answer["error"] = {"code": error.code, "message": str(error)}
        except Exception as error:  # The server wants an answer whatever happened; the log gets the rest.
            sys.excepthook(*sys.exc_info())
            answer["error"] = {"code": "failed", "message": f"{type(error).__name__}: {error}"}
        with os.fdopen(answers, "w") as out:
            json.dump(answer, out)
