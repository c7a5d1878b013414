"""Transport: what gRPC itself is told of a server's connections, so that none is held for nothing.

The names are those of grpc_types.h in gRPC's core. May import: config.
"""

from service.config import ServiceConfig

Options = tuple[tuple[str, int], ...]

_METADATA_BYTES = 8192  # what gRPC has as its soft limit; a key, a trace's parent and a deadline are some 300
_LONGEST_ANSWER_S = 20.0  # to a ping
_LEAST_PING_MS = 10_000  # below which gRPC's clients do not set their own keepalive
# Calls that are not the service's own: health's Watch, reflection.
_OTHER_CALLS = 32
_PROBE_CONNECTIONS = 1024  # so many that those which say nothing keep no probe out


def server_options(config: ServiceConfig) -> Options:
    """Give the options of the port for everything."""
    # Above what a connection may have, so that who asks for more is told why, and what to change.
    most_calls = config.max_connection_requests + config.max_connection_streams + _OTHER_CALLS
    return (
        *_guard(config, config.max_connections, most_calls),
        ("grpc.max_receive_message_length", config.max_request_bytes),
        ("grpc.max_send_message_length", -1),  # the servicer bounds its answers, with a better message
        # Of calls that are begun and reset by the thousand gRPC would cancel others' at random, from a thousand on that
        # the event loop has not come to yet (measured: 11 of 2,000).
        # In seconds. Of ten times what one core can do the event loop else saw each call only when its time was up:
        # 8 answers a second, with this 200 to 230. gRPC ends such calls with CANCELLED.
        ("grpc.server_max_unrequested_time_in_server", 1),
        ("grpc.server.max_pending_requests", 32_768),
        ("grpc.server.max_pending_requests_hard_limit", 65_536),
    )


def probe_options(config: ServiceConfig) -> Options:
    """Give the options of the port for health alone."""
    return _guard(config, _PROBE_CONNECTIONS, _OTHER_CALLS)


def _guard(config: ServiceConfig, most_connections: int, most_calls: int) -> Options:
    patience_ms = _ms(min(config.keepalive_time_s, _LONGEST_ANSWER_S))
    return (
        ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a riddle
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.max_concurrent_streams", min(most_calls, 2**31 - 1)),
        # TLS and HTTP/2's first words together: whoever connects and says nothing is gone after it.
        ("grpc.server_handshake_timeout_ms", _ms(config.handshake_timeout_s)),
        # A peer that vanished without a word, with calls or without, does not answer this.
        ("grpc.keepalive_time_ms", _ms(config.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),  # which alone ends it: with 60 s, its default, nothing did before
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_MS),
        ("grpc.max_connection_idle_ms", _ms(config.max_connection_idle_s)),
        # Else gRPC lets a fast connection send ever more ahead of what is read: of 128 streams whose requests had 4 MiB
        # the server then held 3.0 GB, and 1.7 GB without.
        ("grpc.http2.bdp_probe", 0),
        # One number for both: between them gRPC would refuse by chance.
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
    )


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
