ARG {arg}={base}:latest
FROM ${{{arg}}}

USER root
COPY . /app/env
{install}
USER env
EXPOSE {port}
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 CMD ["healthcheck"]
CMD ["ropewalk", "serve", "/app/env", "--host", "0.0.0.0", "--port", "{port}"]
