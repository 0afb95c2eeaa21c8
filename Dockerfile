# Runs `fairlane serve`. Redis and MongoDB are not in the image, so pass their addresses. Without the
# address of MongoDB, counters and automations do not run:
#   docker build -t fairlane .
#   docker run --network NETWORK --stop-timeout 35 -p 127.0.0.1:9464:9464 \
#     -e FAIRLANE__REDIS__URL=redis://redis:6379 -e FAIRLANE__MONGODB__URL=mongodb://mongodb fairlane
# NETWORK is the network in which redis and mongodb are names of containers.
# The stop timeout is `shutdown_delay` (0 s) + `shutdown_grace` (25 s) + 10 s. Mount a
# configuration at /etc/fairlane/fairlane.toml. HTTP listens on the container's loopback. To make it
# reachable, add tokens (`auth`) and set FAIRLANE__HTTP__LISTEN=0.0.0.0:8080. Other commands:
# docker run … fairlane check
# docker-compose.yml starts Fairlane with all other services.

# This image has the C compiler that builds TLS (ring) and the allocator.
FROM rust:1.95.0-slim-trixie AS build
# The client of Kafka is built from C and C++, with OpenSSL.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make pkg-config libssl-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# Copies only the sources of the binary, so that other changes cause no new build.
COPY Cargo.toml Cargo.lock ./
# Cargo reads the manifest of every package of the workspace, even if it does not build the package.
COPY benches/Cargo.toml benches/
COPY benches/instructions/Cargo.toml benches/instructions/
COPY testkit/Cargo.toml testkit/
COPY tests/model/Cargo.toml tests/model/
COPY tests/mutants/Cargo.toml tests/mutants/
COPY lua lua
COPY docs/runbook.md docs/
COPY src src
# The commit in fairlane_build_info.
ARG FAIRLANE_COMMIT=unknown
# The caches keep downloads and compiled files. They are not part of the image, so the binary is
# copied out of them. Only one build at a time can use `target`.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,sharing=locked \
    cargo build --release --locked --features nats,kafka --bin fairlane \
    && cp target/release/fairlane /usr/local/bin/fairlane

FROM debian:13.6-slim
# The newest certificates of the authorities that sign rediss:// and https:// targets, and OpenSSL of the
# release of Debian that the program was built on.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libssl3t64 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --no-log-init --uid 10001 --user-group --shell /usr/sbin/nologin \
       --create-home --home-dir /var/lib/fairlane fairlane \
    && mkdir /etc/fairlane
COPY --from=build /usr/local/bin/fairlane /usr/local/bin/fairlane
COPY LICENSE LICENSE-APACHE LICENSE-MIT /usr/share/doc/fairlane/
LABEL org.opencontainers.image.title="fairlane" \
      org.opencontainers.image.description="Per-tenant event fan-out worker pool on Redis" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"
# A number, so that Kubernetes can verify that the user is not root.
USER 10001:10001
WORKDIR /var/lib/fairlane

# Prometheus could not reach the default, which is loopback.
ENV FAIRLANE__METRICS__LISTEN=0.0.0.0:9464
EXPOSE 8080 9464

# Calls the running process. The base image has bash, but no curl.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["bash", "-c", "\
    exec 3<>/dev/tcp/127.0.0.1/${FAIRLANE__METRICS__LISTEN##*:} && \
    printf 'GET /healthz HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && \
    read -r _ status _ <&3 && [[ $status == 200 ]]"]

# No init process is needed. Fairlane handles signals itself, and starts no programs when Redis and
# MongoDB run elsewhere.
ENTRYPOINT ["fairlane"]
CMD ["serve"]
