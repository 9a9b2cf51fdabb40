# The server, runsc and a base image for sandboxes, ready to run. What it needs of whoever runs it: deploy/README.md.
#
#   docker build -t sandboxer .

# --- runsc: the version that the project is tested with, built from its sources -----------------------------------------------------
FROM golang:1.26-bookworm AS runsc
# As in scripts/setup, which says why each flag is there.
RUN CGO_ENABLED=0 GOBIN=/out go install -trimpath \
    -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=release-20260905.0" \
    gvisor.dev/gvisor/runsc@v0.0.0-20260905035102-160fafc42237

# --- sandboxer ----------------------------------------------------------------------------------------------------------------------
FROM rust:1-bookworm AS sandboxer
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin sandboxer && install -D target/release/sandboxer /out/sandboxer

# --- the base image of sandboxes: built here, so that an instance is ready as soon as it starts --------------------------------------
FROM debian:bookworm-slim AS image
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates erofs-utils fakechroot fakeroot mmdebstrap util-linux && \
    rm -rf /var/lib/apt/lists/* && useradd --create-home builder
COPY --from=sandboxer /out/sandboxer /usr/local/bin/sandboxer
# As an ordinary user: that way needs no privileges of the build.
USER builder
# What a second build would save time with stays behind.
RUN sandboxer image build --image-dir /home/builder/images && rm -r /home/builder/images/cache

# --- what runs ----------------------------------------------------------------------------------------------------------------------
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates erofs-utils tini util-linux && \
    rm -rf /var/lib/apt/lists/* && useradd --uid 10001 --create-home --home-dir /var/lib/sandboxer sandboxer
COPY --from=runsc /out/runsc /usr/local/bin/runsc
COPY --from=sandboxer /out/sandboxer /usr/local/bin/sandboxer
COPY --from=image --chown=10001:10001 /home/builder/images /var/lib/sandboxer/images
# Where it may have a user namespace of its own it needs no root; where it may not, run it as root (deploy/README.md).
USER 10001:10001
ENV SANDBOXER_RUNSC=/usr/local/bin/runsc \
    SANDBOXER_IMAGE_DIR=/var/lib/sandboxer/images \
    SANDBOXER_DATA_DIR=/var/lib/sandboxer/data \
    SANDBOXER_LISTEN=0.0.0.0 \
    SANDBOXER_LOG_FORMAT=json
EXPOSE 8080
# The server reaps what its sandboxes leave; tini is there for what a platform's own hooks leave.
ENTRYPOINT ["tini", "--", "sandboxer"]
CMD ["serve"]
