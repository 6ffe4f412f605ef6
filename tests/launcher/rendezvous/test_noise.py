"""The handshake and the ciphers, against another implementation of the same framework."""

import pytest

from hvdrun.rendezvous.noise import PROLOGUE, Cipher, Handshake, NotProved

noise = pytest.importorskip("noise.connection", reason="noiseprotocol, of the extra `test`")

KEY = bytes(range(32))
OTHER_KEY = bytes(32)


def other_implementation(is_caller):
    end = noise.NoiseConnection.from_name(b"Noise_NNpsk0_25519_ChaChaPoly_SHA256")
    end.set_psks(KEY)
    end.set_prologue(PROLOGUE)
    if is_caller:
        end.set_as_initiator()
    else:
        end.set_as_responder()
    end.start_handshake()
    return end


def connected():
    caller, listener = Handshake(KEY), Handshake(KEY)
    answer, listener_ciphers = listener.answer_first(caller.first())
    return caller.hear_second(answer), listener_ciphers


def test_a_caller_and_another_implementation_understand_each_other():
    peer, own = other_implementation(is_caller=False), Handshake(KEY)
    peer.read_message(own.first())
    sending, receiving = own.hear_second(bytes(peer.write_message()))
    for text in (b"one", b"", b"three" * 1000):
        assert bytes(peer.decrypt(sending.encrypt(text))) == text
        assert receiving.decrypt(bytes(peer.encrypt(text))) == text


def test_a_listener_and_another_implementation_understand_each_other():
    peer = other_implementation(is_caller=True)
    answer, (sending, receiving) = Handshake(KEY).answer_first(bytes(peer.write_message()))
    peer.read_message(answer)
    for text in (b"one", b"", b"three" * 1000):
        assert bytes(peer.decrypt(sending.encrypt(text))) == text
        assert receiving.decrypt(bytes(peer.encrypt(text))) == text


def test_a_listener_with_another_key_refuses_the_first_message():
    with pytest.raises(NotProved):
        Handshake(OTHER_KEY).answer_first(Handshake(KEY).first())


def test_a_caller_refuses_the_answer_of_a_listener_that_guesses_the_key():
    caller = Handshake(KEY)
    caller.first()
    answer, _ = Handshake(OTHER_KEY).answer_first(Handshake(OTHER_KEY).first())
    with pytest.raises(NotProved):
        caller.hear_second(answer)


def test_ends_of_different_versions_refuse_each_other():
    with pytest.raises(NotProved):
        Handshake(KEY, b"hvdlite rendezvous 0").answer_first(Handshake(KEY).first())


@pytest.mark.parametrize("bit", [0, 100, 8 * 32, 8 * 48 - 1])
def test_a_changed_bit_in_either_message_is_noticed(bit):
    def changed(message):
        return (int.from_bytes(message, "big") ^ (1 << bit)).to_bytes(len(message), "big")

    with pytest.raises(NotProved):
        Handshake(KEY).answer_first(changed(Handshake(KEY).first()))
    caller = Handshake(KEY)
    answer, _ = Handshake(KEY).answer_first(caller.first())
    with pytest.raises(NotProved):
        caller.hear_second(changed(answer))


def test_a_recorded_first_message_gives_its_sender_nothing():
    caller = Handshake(KEY)
    recorded = caller.first()
    answer, _ = Handshake(KEY).answer_first(recorded)
    (sending, _) = caller.hear_second(answer)
    _, (_, receiving_again) = Handshake(KEY).answer_first(recorded)
    with pytest.raises(NotProved):
        receiving_again.decrypt(sending.encrypt(b"run this"))


def test_a_public_key_that_makes_every_secret_zero_is_refused():
    caller = Handshake(KEY)
    caller.first()
    with pytest.raises(NotProved):
        caller.hear_second(bytes(48))


@pytest.mark.parametrize("change", ["changed", "left out", "repeated", "reflected"])
def test_a_message_is_noticed_that_is(change):
    (sending, own_receiving), (_, receiving) = connected()
    first, second = sending.encrypt(b"first"), sending.encrypt(b"second")
    if change == "reflected":
        with pytest.raises(NotProved):
            own_receiving.decrypt(first)
        return
    if change == "repeated":
        receiving.decrypt(first)
        wrong = first
    else:
        wrong = second if change == "left out" else bytes([first[0] ^ 1]) + first[1:]
    with pytest.raises(NotProved):
        receiving.decrypt(wrong)


def test_equal_messages_look_different_each_time():
    cipher = Cipher(KEY)
    assert len({cipher.encrypt(b"same") for _ in range(100)}) == 100
