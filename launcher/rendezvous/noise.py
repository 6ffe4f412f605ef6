"""Two ends that have the same key prove it to each other, and encrypt what they send: the pattern
NNpsk0 of the Noise Protocol Framework (noiseprotocol.org, revision 34), with X25519,
ChaCha20-Poly1305 and SHA-256.

    caller   → psk, e     a new public key, and a proof of the psk
    listener ← e, ee      the same; from both new keys follow the keys of this connection

Both messages are 48 bytes. The new keys are what nonces are elsewhere: a recorded first message can
be sent again, but whoever does so can't send what follows. So a listener trusts a caller only after
the first message of the encrypted connection. Whoever learns the psk later can't decrypt what was
recorded before. Each message after these has a counter of its direction in its nonce: one that is
changed, left out, repeated or reflected can't be decrypted.

No message tells a stranger anything about the psk, except that it lets him test guesses: it must be
random (see `secret`).
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

_NAME = b"Noise_NNpsk0_25519_ChaChaPoly_SHA256"
PROLOGUE = b"hvdlite rendezvous 1"  # both ends must speak the same version
KEY_BYTES = 32
TAG_BYTES = 16
HANDSHAKE_BYTES = KEY_BYTES + TAG_BYTES
MESSAGE_BYTES = 65535  # the longest encrypted message
_NONCE = struct.Struct("<4xQ")


class NotProved(Exception):
    """The other end does not have the key, or the message was changed on the way."""


class Cipher:
    """One direction of a connection. Messages are decrypted in the order of their encryption."""

    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)
        self._count = 0

    def encrypt(self, data: bytes, associated: bytes = b"") -> bytes:
        return self._aead.encrypt(self._next(), data, associated)

    def decrypt(self, data: bytes, associated: bytes = b"") -> bytes:
        """Raises NotProved."""
        try:
            return self._aead.decrypt(self._next(), data, associated)
        except InvalidTag:
            raise NotProved from None

    def _next(self) -> bytes:
        nonce = _NONCE.pack(self._count)
        self._count += 1
        return nonce


class Handshake:
    """One end's part. The caller sends `first()`, and hears `second`; the listener hears `first`.

    Each of them is called once, in this order:

        caller:    message = first()        ciphers = hear_second(answer)
        listener:  answer, ciphers = answer_first(message)

    ciphers: what this end sends with, and what it receives with.
    """

    def __init__(self, psk: bytes, prologue: bytes = PROLOGUE) -> None:
        self._psk = psk
        self._hash = hashlib.sha256(_NAME).digest()
        self._chain = self._hash
        self._own = X25519PrivateKey.generate()
        self._mix_hash(prologue)

    def first(self) -> bytes:
        self._mix_psk()
        return self._send_key()

    def answer_first(self, message: bytes) -> tuple[bytes, tuple[Cipher, Cipher]]:
        """Raises NotProved. A stranger's message costs no operation with keys."""
        self._mix_psk()
        other = self._hear_key(message[:KEY_BYTES])
        self._hear_proof(message[KEY_BYTES:])
        answer_key = self._public(self._own)
        self._mix_hash(answer_key)
        self._mix_key(answer_key)
        self._mix_key(self._shared(other))
        answer = answer_key + self._proof()
        from_caller, from_listener = self._split()
        return answer, (from_listener, from_caller)

    def hear_second(self, message: bytes) -> tuple[Cipher, Cipher]:
        """Raises NotProved."""
        other = self._hear_key(message[:KEY_BYTES])
        self._mix_key(self._shared(other))
        self._hear_proof(message[KEY_BYTES:])
        return self._split()

    # ---------------------------------------------- the framework's own steps

    @staticmethod
    def _public(key: X25519PrivateKey) -> bytes:
        return key.public_key().public_bytes_raw()

    def _shared(self, other: bytes) -> bytes:
        try:
            return self._own.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError:  # a public key with which every result is zero
            raise NotProved from None

    def _send_key(self) -> bytes:
        key = self._public(self._own)
        self._mix_hash(key)
        self._mix_key(key)  # as every pattern with a psk does
        return key + self._proof()

    def _hear_key(self, key: bytes) -> bytes:
        self._mix_hash(key)
        self._mix_key(key)
        return key

    def _proof(self) -> bytes:
        """An empty text, encrypted."""
        sent = Cipher(self._key).encrypt(b"", self._hash)
        self._mix_hash(sent)
        return sent

    def _hear_proof(self, sent: bytes) -> None:
        Cipher(self._key).decrypt(sent, self._hash)
        self._mix_hash(sent)

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chain, self._key = _derive(self._chain, material, 2)

    def _mix_psk(self) -> None:
        self._chain, mixed, self._key = _derive(self._chain, self._psk, 3)
        self._mix_hash(mixed)

    def _split(self) -> tuple[Cipher, Cipher]:
        """The caller's direction, then the listener's."""
        one, two = _derive(self._chain, b"", 2)
        return Cipher(one), Cipher(two)


def _derive(chain: bytes, material: bytes, count: int) -> list[bytes]:
    """HKDF of RFC 5869, without info."""
    key = hmac.digest(chain, material, "sha256")
    found: list[bytes] = []
    for number in range(1, count + 1):
        before = found[-1] if found else b""
        found.append(hmac.digest(key, before + bytes([number]), "sha256"))
    return found
