#!/usr/bin/env python3
"""Fetches a source archive from the package index that pip is configured for, checks its SHA-256, and unpacks chosen folders.

`pip download` cannot be used for this: it builds a source package's metadata, which compiles the whole package.

usage: fetch_sdist.py NAME==VERSION SHA256 DESTINATION FOLDER_INSIDE [FOLDER_INSIDE ...]
"""
import hashlib
import io
import pathlib
import sys
import tarfile

from pip._internal.commands import create_command


def fetch(name: str, version: str) -> bytes:
    command = create_command("download")
    options, _ = command.parse_args([name])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        for candidate in finder.find_all_candidates(name):
            link = candidate.link
            if str(candidate.version) == version and link.filename.endswith(".tar.gz"):
                response = session.get(link.url_without_fragment)
                response.raise_for_status()
                return response.content
    sys.exit(f"fetch_sdist: the package index has no source archive of {name} {version}")


def main() -> None:
    spec, sha256, destination, *folders = sys.argv[1:]
    name, version = spec.split("==")
    blob = fetch(name, version)
    found = hashlib.sha256(blob).hexdigest()
    if found != sha256:
        sys.exit(f"fetch_sdist: {spec} has SHA-256 {found}, expected {sha256}; refusing to use it")
    target = pathlib.Path(destination)
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:gz") as archive:
        for member in archive.getmembers():
            inside = member.name.split("/", 1)[-1]
            if member.isfile() and any(inside.startswith(folder) for folder in folders):
                path = target / inside
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())


main()
