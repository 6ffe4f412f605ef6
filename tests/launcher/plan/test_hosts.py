import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.errors import HostListError, TooManyProcesses
from hvdrun.plan.hosts import Host, Share, parse_hostfile, parse_hosts, place

names = st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z]{1,5})?", fullmatch=True)
slots = st.none() | st.integers(1, 99)
host_lists = st.lists(
    st.builds(Host, names, slots), min_size=1, max_size=6, unique_by=lambda h: h.name
)


def written(host):
    name = f"[{host.name}]" if ":" in host.name else host.name
    user = f"{host.user}@" if host.user else ""
    return f"{user}{name}" + ("" if host.slots is None else f":{host.slots}")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("server1", Host("server1")),
        ("server1:4", Host("server1", 4)),
        ("ann@server1:4", Host("server1", 4, "ann")),
        ("10.0.0.7:2", Host("10.0.0.7", 2)),
        ("[fd00::1]", Host("fd00::1")),
        ("[fd00::1]:2", Host("fd00::1", 2)),
        ("ann@[fe80::1%eth0]:2", Host("fe80::1%eth0", 2, "ann")),
        ("[FD00:0::0:1]:2", Host("fd00::1", 2)),
    ],
)
def test_a_host_is_a_name_or_address_with_perhaps_slots_and_a_user(text, host):
    assert parse_hosts(text) == (host,)


@given(host_lists)
def test_a_list_keeps_its_hosts_and_their_order(hosts):
    assert parse_hosts(",".join(map(written, hosts))) == tuple(hosts)


@given(host_lists)
def test_a_hostfile_says_the_same_in_the_form_of_either_mpi(hosts):
    mpich = "\n".join(map(written, hosts))
    openmpi = "\n".join(h.name + (f" slots = {h.slots}" if h.slots else "") for h in hosts)
    assert parse_hostfile(mpich, "hosts") == tuple(hosts)
    assert parse_hostfile(openmpi, "hosts") == tuple(hosts)


def test_a_hostfile_may_have_comments_and_blank_lines():
    text = "# ours\n\nserver1 slots=4   # the big one\n   \nann@server2:2\n"
    assert parse_hostfile(text, "hosts") == (Host("server1", 4), Host("server2", 2, "ann"))


def test_a_hostfile_may_come_from_another_system():
    text = "\ufeffserver1 slots=4\r\n\r\nserver2:2\r\n"
    assert parse_hostfile(text, "hosts") == (Host("server1", 4), Host("server2", 2))


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("server1 max_slots=8", Host("server1", max_slots=8)),
        ("server1 slots=4 max-slots=8", Host("server1", 4, max_slots=8)),
        ("server1:4 slots-max=8", Host("server1", 4, max_slots=8)),
        ("server1:4 user=ann", Host("server1", 4, "ann")),
        ("server1 username=ann port=2222", Host("server1", user="ann", port=2222)),
        ("ann@[fd00::1]:2 port = 22", Host("fd00::1", 2, "ann", 22)),
    ],
)
def test_a_line_may_say_more_of_a_host(line, host):
    assert parse_hostfile(line, "hosts") == (host,)


def test_a_host_named_several_times_has_the_slots_of_all():
    assert parse_hosts("a:2,b:1,A:3") == (Host("a", 5), Host("b", 1))
    assert parse_hosts("a,b,a,a") == (Host("a", 3), Host("b", 1))
    assert parse_hosts("a:2,a:1,b") == (Host("a", 3), Host("b"))
    assert parse_hosts("a:2,a") == (Host("a", 3),)
    assert parse_hosts("[fd00::1]:2,[fd00:0::1]:1") == (Host("fd00::1", 3),)
    twice = "a slots=1 max_slots=2\na slots=2 max_slots=3\n"
    assert parse_hostfile(twice, "hosts") == (Host("a", 3, max_slots=5),)


@pytest.mark.parametrize("text", ["ann@a:1,b,a:1", "a,b,ann@A"])
def test_a_host_named_with_two_users_is_an_error_at_the_second(text):
    with pytest.raises(HostListError, match=r"^-H, entry 3 \('.*'\): [aA] was listed before"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "-H, entry 1 (''): it is empty"),
        ("a:2,,b", "-H, entry 2 (''): it is empty"),
        ("a:2,b:x", "-H, entry 2 ('b:x'): the slots must be a whole number above 0, not 'x'"),
        ("a:0", "not '0'"),
        ("a:-1", "not '-1'"),
        ("a:", "not ''"),
        ("fd00::1", "put an IPv6 address into brackets"),
        ("[fd00::1", "expected '[ADDRESS]'"),
        ("[server1]:2", "'server1' is not an IPv6 address"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host name"),
        ("[1:2]:3", "'1:2' is not an IPv6 address"),
        ("[.:.]", "'.:.' is not an IPv6 address"),
        ("[fe80::1%$(id)]", "'fe80::1%$(id)' is not an IPv6 address"),
        ("a:4 b:4", "-H, entry 1 ('a:4 b:4'): put nothing but a comma between two hosts"),
        ("a;b", "put nothing but a comma between two hosts"),
        ("$(id)", "is not a host name"),
        ("-l@a", "'-l' is not a user name"),
    ],
)
def test_a_mistake_in_a_list_is_an_error_that_says_which_entry(text, message):
    with pytest.raises(HostListError) as caught:
        parse_hosts(text)
    assert str(caught.value).startswith("-H, entry ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("server1 slots=x", "the slots must be a whole number above 0, not 'x'"),
        ("server1 cores=4", "'cores=4' is not a setting of a host"),
        ("server1 4", "'4' is not a setting of a host"),
        ("server1:4 slots=4", "the slots are given twice"),
        ("server1 slots=8 max_slots=4", "slots=8 is more than max_slots=4"),
        ("server1, server2", "'server1, server2' has a comma; write one host per line"),
        ("server1:4,server2:4", "has a comma"),
        ("server 1", "'1' is not a setting of a host"),
        ("server1 port=0", "'0' is not a port; expected 1 to 65535"),
        ("server1 port=ssh", "'ssh' is not a port"),
        ("ann@server1 user=bob", "user is given twice"),
        ("server1 user=", "'' is not a user name"),
        ("server0 port=22", "server0 was listed before, with another user or port"),
    ],
)
def test_a_mistake_in_a_hostfile_is_an_error_with_file_and_line(line, message):
    with pytest.raises(HostListError) as caught:
        parse_hostfile(f"# hosts\nserver0 slots=1\n{line}\n", "my/hosts")
    assert str(caught.value).startswith("my/hosts:3: ")
    assert message in str(caught.value)


def test_a_hostfile_without_hosts_is_an_error():
    with pytest.raises(HostListError, match="names no host"):
        parse_hostfile("# nobody\n\n", "hosts")


@given(st.text(max_size=40))
def test_any_text_is_a_host_list_or_a_clear_error(text):
    try:
        hosts = parse_hosts(text)
    except HostListError:
        return
    assert all(not host.name.startswith("-") for host in hosts)


def shares(hosts, num_proc=None, default=2):
    return [(s.host.name, s.count) for s in place(hosts, num_proc, lambda host: default)]


def test_ranks_fill_one_host_after_the_other():
    assert shares(parse_hosts("a:3,b:1")) == [("a", 3), ("b", 1)]
    assert shares(parse_hosts("a:3,b:3"), 4) == [("a", 3), ("b", 1)]
    assert shares(parse_hosts("a:3,b:3"), 2) == [("a", 2)]


def test_without_a_number_a_host_has_the_default():
    assert shares(parse_hosts("a,b:1")) == [("a", 2), ("b", 1)]


def test_more_processes_than_the_given_slots_are_an_error_that_says_both_numbers():
    with pytest.raises(TooManyProcesses) as caught:
        shares(parse_hosts("a:2,b:1"), 4)
    assert str(caught.value) == (
        "-np 4 asks for more processes than the 3 slots of a:2, b:1; lower -np, or give more slots,"
        " as in -H a:4"
    )


def test_one_slot_is_not_1_slots():
    with pytest.raises(TooManyProcesses, match="more processes than the 1 slot of a:1; lower"):
        shares(parse_hosts("a:1"), 2)


def test_a_host_whose_slots_are_a_guess_takes_more():
    assert shares(parse_hosts("a:1,b,c"), 8) == [("a", 1), ("b", 4), ("c", 3)]


def test_a_host_takes_no_more_than_its_max_slots():
    def hosts(text):
        return parse_hostfile(text, "hosts")

    assert shares(hosts("a max_slots=1\nb")) == [("a", 1), ("b", 2)]
    assert shares(hosts("a max_slots=3\nb"), 9) == [("a", 3), ("b", 6)]
    with pytest.raises(TooManyProcesses, match="the 5 slots of a:3, b:2; lower -np"):
        shares(hosts("a max_slots=3\nb slots=2"), 6)


def test_too_many_processes_in_an_allocation_are_the_schedulers_to_give():
    with pytest.raises(TooManyProcesses, match="of a:2; lower -np, or ask Slurm for more"):
        place(parse_hosts("a:2"), 3, lambda host: 1, "ask Slurm for more (--ntasks)")


@given(host_lists, st.integers(1, 300))
def test_every_rank_has_one_place_or_there_is_an_error(hosts, num_proc):
    try:
        placed = place(hosts, num_proc, lambda host: 4)
    except TooManyProcesses:
        assert num_proc > sum(h.slots for h in hosts)
        return
    assert sum(share.count for share in placed) == num_proc
    assert [s.host for s in placed] == [h for h in hosts if h in {s.host for s in placed}]
    assert all(isinstance(s, Share) and s.count > 0 for s in placed)
    assert all(s.host.slots is None or s.count <= s.host.slots for s in placed)
