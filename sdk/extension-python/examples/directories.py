#!/usr/bin/env python3
"""Sandboxes that are directories with one file, and snapshots that are copies of them: all that an extension has to do."""

import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from sandboxer_extension import ExtensionError, SandboxExtension


class Directories(SandboxExtension):
    name = "ext.directories"

    def directory(self):
        return pathlib.Path("sandboxes", self.sandbox_id)

    def validate(self, profile, inputs, host):
        if inputs.get("content") == "refused":
            raise ExtensionError("inputs.content: this one is refused.", "invalid")

    def provision(self, profile, inputs, host):
        self.directory().mkdir(parents=True)
        (self.directory() / "content").write_text(inputs.get("content", "empty"))
        return {"path": str(self.directory().resolve())}

    def status(self, handle):
        return "ready" if self.directory().is_dir() else "gone"

    def teardown(self, handle):
        shutil.rmtree(self.directory(), ignore_errors=True)

    def supports_snapshots(self):
        return True

    def snapshot(self, handle):
        copy = pathlib.Path("snapshots", self.snapshot_id)
        shutil.copytree(self.directory(), copy)
        return {"path": str(copy.resolve()), "size_bytes": str(sum(file.stat().st_size for file in copy.iterdir()))}

    def restore_from_snapshot(self, profile, snapshot_meta, inputs, host):
        shutil.copytree(pathlib.Path("snapshots", self.snapshot_id), self.directory())
        return {"path": str(self.directory().resolve())}

    def delete_snapshot(self, snapshot_meta, host):
        shutil.rmtree(pathlib.Path("snapshots", self.snapshot_id), ignore_errors=True)


if __name__ == "__main__":
    Directories().main()
