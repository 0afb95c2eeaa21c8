# `fairlane serve` beside a Redis of yours; there is none in the image, so the address must be given:
#   docker build -t fairlane .
#   docker run -e FAIRLANE__REDIS__URL=redis://redis:6379 -p 9464:9464 --stop-timeout 30 fairlane
# The stop timeout leaves room for `shutdown_grace` (25 s). A configuration file goes to
# /etc/fairlane/fairlane.toml. Other commands: docker run … fairlane check

# Brings the C compiler that TLS (ring) and the allocator are built with.
FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin fairlane \
    && cp target/release/fairlane /usr/local/bin/fairlane

FROM debian:bookworm-slim
# The authorities that rediss:// and https:// targets are trusted by.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --user-group --create-home --home-dir /var/lib/fairlane fairlane
COPY --from=build /usr/local/bin/fairlane /usr/local/bin/fairlane
USER 10001:10001
WORKDIR /var/lib/fairlane

# Loopback, the default, would be out of Prometheus' reach.
ENV FAIRLANE__METRICS__LISTEN=0.0.0.0:9464
EXPOSE 9464

# Asks the running process itself, with what the base image has: bash, but no curl.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["bash", "-c", "\
    exec 3<>/dev/tcp/127.0.0.1/${FAIRLANE__METRICS__LISTEN##*:} && \
    printf 'GET /healthz HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && \
    read -r _ status _ <&3 && [[ $status == 200 ]]"]

ENTRYPOINT ["fairlane"]
CMD ["serve"]
