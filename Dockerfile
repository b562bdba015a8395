# Builds Aquila, then makes an image of the binary and the shipped models:
#   docker build --build-arg AQUILA_COMMIT=$(git rev-parse --short=12 HEAD) -t aquila .
#   docker run --rm -p 30000:30000 -v aquila:/var/lib/aquila aquila serve --host 0.0.0.0 MODEL
FROM rust:1.95-slim-bookworm AS build
WORKDIR /src
COPY . .
# What `aquila --version` says, since the repository itself is not copied.
ARG AQUILA_COMMIT
RUN cargo build --locked --profile dist -p aquila

FROM debian:bookworm-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/aquila --create-home aquila
COPY --from=build /src/target/dist/aquila /usr/local/bin/aquila
COPY --from=build /src/models/*.tar.zst /usr/local/share/aquila/models/
# Models of the hub, unpacked models and measured costs are kept below one folder.
ENV HF_HOME=/var/lib/aquila/huggingface XDG_CACHE_HOME=/var/lib/aquila/cache
USER aquila
VOLUME /var/lib/aquila
EXPOSE 30000
ENTRYPOINT ["aquila"]
CMD ["serve", "--host", "0.0.0.0"]
