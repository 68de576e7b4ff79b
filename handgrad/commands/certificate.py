"""handgrad certificate: a small file that names the data of a run by their hashes."""

from argparse import Namespace
from pathlib import Path

from handgrad.errors import UsageError, storage_errors
from handgrad.files import write_durably
from handgrad.storage.run_files import METRICS_FILE, named_run
from handgrad.tools.certificate import certificate_text, evaluations, make_certificate, signed
from handgrad.tools.record import open_record

NAME = "certificate.json"


def run(parsed: Namespace) -> int:
    folder = Path(parsed.run)
    if not folder.is_dir():
        raise UsageError(f"expected a run folder, found {folder}; {named_run(folder)}")
    certificate = make_certificate(open_record(folder).lines, evaluations(folder / METRICS_FILE))
    if parsed.key:
        certificate = signed(certificate, Path(parsed.key))
    out = Path(parsed.out or folder / NAME)
    with storage_errors(f"writing {out}"):
        write_durably(out, certificate_text(certificate))
    print(f"certificate {out}")
    return 0
