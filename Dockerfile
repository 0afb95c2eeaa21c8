# `fairlane serve`. Redis and MongoDB are not in the image, so their addresses must be given; without
# the one of MongoDB, what needs it does not run:
#   docker build -t fairlane .
#   docker run --stop-timeout 35 -p 127.0.0.1:9464:9464 \
#     -e FAIRLANE__REDIS__URL=redis://redis:6379 -e FAIRLANE__MONGODB__URL=mongodb://mongodb fairlane
# The stop timeout leaves room for `shutdown_delay` (0 s) and `shutdown_grace` (25 s). A
# configuration goes to /etc/fairlane/fairlane.toml; HTTP stays on the container's loopback until it
# says who may come in (`auth`) and FAIRLANE__HTTP__LISTEN=0.0.0.0:8080. Other commands:
# docker run … fairlane check
# With everything around it: docker-compose.yml.

# Brings the C compiler that TLS (ring) and the allocator are built with.
FROM rust:1.95.0-slim-trixie AS build
WORKDIR /src
# What the binary is made of and nothing else: a change elsewhere builds nothing again.
COPY Cargo.toml Cargo.lock ./
# Cargo reads the manifest of every package of the workspace, also of those that it does not build.
COPY benches/Cargo.toml benches/
COPY lua lua
COPY src src
# What fairlane_build_info tells.
ARG FAIRLANE_COMMIT=unknown
# The caches keep what was downloaded and compiled; they are no part of the image, so the binary is
# taken out. One build at a time has `target`.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target,sharing=locked \
    cargo build --release --locked --bin fairlane \
    && cp target/release/fairlane /usr/local/bin/fairlane

FROM debian:13.6-slim
# The authorities that rediss:// and https:// targets are trusted by: the newest there are.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --no-log-init --uid 10001 --user-group --shell /usr/sbin/nologin \
       --create-home --home-dir /var/lib/fairlane fairlane \
    && mkdir /etc/fairlane
COPY --from=build /usr/local/bin/fairlane /usr/local/bin/fairlane
COPY LICENSE LICENSE-APACHE LICENSE-MIT /usr/share/doc/fairlane/
LABEL org.opencontainers.image.title="fairlane" \
      org.opencontainers.image.description="Per-tenant event fan-out worker pool on Redis" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /var/lib/fairlane

# Loopback, the default, would be out of Prometheus' reach.
ENV FAIRLANE__METRICS__LISTEN=0.0.0.0:9464
EXPOSE 8080 9464

# Asks the running process itself, with what the base image has: bash, but no curl.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["bash", "-c", "\
    exec 3<>/dev/tcp/127.0.0.1/${FAIRLANE__METRICS__LISTEN##*:} && \
    printf 'GET /healthz HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && \
    read -r _ status _ <&3 && [[ $status == 200 ]]"]

# No init is needed: Fairlane listens to signals itself and, where Redis and MongoDB are elsewhere,
# starts no program.
ENTRYPOINT ["fairlane"]
CMD ["serve"]
