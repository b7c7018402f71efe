# docker build -t parvl . && docker run --rm -p 8000:8000 -v /models/qwen2-vl:/model parvl serve --model /model --host 0.0.0.0 --port 8000
FROM debian:12 AS build
RUN apt-get update -q && apt-get install -y -q --no-install-recommends git make ca-certificates
COPY . /src
WORKDIR /src
RUN make install PREFIX=/opt/parvl

FROM debian:12
RUN apt-get update -q && apt-get install -y -q --no-install-recommends libyaml-cpp0.7 libabsl20220623 libjpeg62-turbo libpng16-16 \
    libwebp7 libwebpdemux2 libgif7 libpcre2-8-0 libutf8proc2 libssl3 libcurl4 libprometheus-cpp-core1.0 libgrpc++1.51 \
    ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/parvl /opt/parvl
ENV PATH=/opt/parvl/bin:$PATH
ENTRYPOINT ["parvl"]
CMD ["--help"]
