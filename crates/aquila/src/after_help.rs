//! What stands below the flags in the help of commands.

/// The environment variables that are read, and the exit codes.
pub const AFTER_HELP: &str = "\
Environment:
  AQUILA_API_KEY         a key that clients of aquila serve may send, as --api-key
  AQUILA_ADMIN_API_KEY   the key for routes that change the server, as --admin-api-key
  AQUILA_DISAGGREGATION_SECRET
                         the secret of prefill and decode workers
  AQUILA_LOG             how much is logged, as a tracing filter: debug, aquila_engine=info
  AQUILA_MODELS          a folder with archives of shipped models, looked into first
  HF_HOME, HF_HUB_CACHE  where models of the hub are: $HF_HOME/hub, or $HF_HUB_CACHE itself
  HF_ENDPOINT            the hub to download from [https://huggingface.co]
  HF_HUB_OFFLINE         1: nothing is downloaded, and the hub is not asked
  HF_TOKEN               the token for gated and private models [the content of $HF_HOME/token]
  HTTPS_PROXY, NO_PROXY  the proxy to download through, and the hosts that need none
  OTEL_SERVICE_NAME      the name that spans of --otlp-traces-endpoint have [aquila]
  SGLANG_ENABLE_SPEC_V2  0 means --disable-overlap-schedule, 1 means --enable-overlap-schedule
  NO_COLOR               no colours in the log, whatever its value; files have none anyway
  SSL_CERT_FILE          certificates to trust, as PEM, in place of Mozilla's, which are built in
  OPENAI_API_KEY         the key that aquila bench serve sends, as its --api-key
  XDG_CACHE_HOME         where shipped models are unpacked and costs of rounds are kept [~/.cache]
  XDG_DATA_HOME          where shipped models may be installed [~/.local/share]
  XDG_STATE_HOME         where the history of aquila chat is kept [~/.local/state]

Exit codes: 0 all went well; 1 it could not run, or not to the end; 2 the flags are wrong; 3 it \
ran, but requests failed; 141 the reader of standard output left.";
