#!/bin/sh
# Start of the container: `exec`s vllm-overlay, which becomes vLLM, so that vLLM gets SIGTERM.
#   (nothing)         serve $RECIPE, in the variant $VARIANT
#   -- FLAGS          the same, with vLLM flags that win over the recipe's
#   plan NAME, …      any other command of vllm-overlay
set -eu

if [ "${1-}" = -- ]; then
  shift
elif [ $# -gt 0 ]; then
  exec vllm-overlay "$@"
fi
if [ -z "${RECIPE-}" ]; then
  echo 'RECIPE is not set: name a recipe, for example RECIPE=demo' >&2
  exit 2
fi
for word in "$@"; do
  case $word in
  --host | --host=* | --port | --port=*)
    echo "${word%%=*} is fixed in the container (0.0.0.0:8000): publish another port of the" \
      'host instead, with PORT in compose or -p PORT:8000' >&2
    exit 2
    ;;
  esac
done
# The port is published by the container's runtime, so it is the same for every recipe.
exec vllm-overlay serve "$RECIPE" ${VARIANT:+--variant "$VARIANT"} -- \
  --host 0.0.0.0 --port 8000 "$@"
