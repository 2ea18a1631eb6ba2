"""Certificates and keys: a certificate authority of the federation's own, EC P-256; of every node a key by which it is
let in, EC P-384, and one for secure sums, X25519. A node makes its own, where it will run.

Nothing here is invented: it is what Flower asks for, made with `cryptography`.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedmosaic.core.errors import RunError
from fedmosaic.core.files import write_atomic
from fedmosaic.privacy.secure_sum import Pair

YEARS = 5
CA, CA_KEY = "ca.crt", "ca.key"
CERTIFICATE, KEY = "server.crt", "server.key"
NODE_KEY, SUM_KEY = "node.key", "sum.key"


def make_authority(folder: Path) -> None:
    """A self-signed authority: ca.crt goes to every node, ca.key stays with the server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedmosaic authority")])
    use = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    made = _begun(name, name, key.public_key())
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(use, True)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    write_atomic(folder / CA, _pem(made.sign(key, hashes.SHA256())))
    write_atomic(folder / CA_KEY, _private(key))


def make_certificate(folder: Path, hosts: list[str]) -> None:
    """The server's certificate, valid for the names and addresses nodes will dial."""
    authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    signer = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedmosaic server")])
    made = _begun(name, authority.subject, key.public_key())
    made = made.add_extension(x509.SubjectAlternativeName([_named(h) for h in hosts]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    write_atomic(folder / CERTIFICATE, _pem(made.sign(signer, hashes.SHA256())))
    write_atomic(folder / KEY, _private(key))


def make_node_keys(folder: Path) -> None:
    """A node's own keys, in its folder, unless they are there."""
    if not (folder / NODE_KEY).is_file():
        form = serialization.PrivateFormat.OpenSSH
        key = ec.generate_private_key(ec.SECP384R1())
        write_atomic(
            folder / NODE_KEY, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        )
    if not (folder / SUM_KEY).is_file():
        write_atomic(folder / SUM_KEY, Pair.new().private)


def node_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """The key by which a node is let in."""
    try:
        private = serialization.load_ssh_private_key(file.read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
    except (OSError, ValueError, AssertionError, UnsupportedAlgorithm):
        raise RunError(f"{file} is missing or damaged; `fedmosaic deploy renew` makes new keys") from None
    return private


def sum_key(file: Path) -> Pair:
    """A node's keys for masks."""
    try:
        return Pair.new(file.read_bytes())
    except (OSError, ValueError):
        raise RunError(f"{file} is missing or damaged; `fedmosaic deploy renew` makes new keys") from None


def public_keys(folder: Path) -> dict[str, str]:
    """The public halves of a node's keys: `key`, by which it is let in, and `sum`, for masks."""
    form = serialization.PublicFormat.OpenSSH
    public = node_key(folder / NODE_KEY).public_key().public_bytes(serialization.Encoding.OpenSSH, form)
    return {"key": public.decode(), "sum": sum_key(folder / SUM_KEY).public.hex()}


def signed(folder: Path, text: bytes) -> str:
    """A signature by a node's key."""
    return node_key(folder / NODE_KEY).sign(text, ec.ECDSA(hashes.SHA256())).hex()


def is_signed(key: str, signature: str, text: bytes) -> bool:
    """Whether the owner of a public key signed a text."""
    try:
        public = serialization.load_ssh_public_key(key.encode())
        assert isinstance(public, ec.EllipticCurvePublicKey)
        public.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, AssertionError, UnsupportedAlgorithm):
        return False
    return True


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=365 * YEARS))


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
