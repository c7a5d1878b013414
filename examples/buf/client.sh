#!/bin/sh
# A client of attencode with nothing but `buf curl`, which learns the contract by reflection: one call, a stream, an
# error with its details, a deadline.
#   sh client.sh 127.0.0.1:50051
address=${1:-127.0.0.1:50051}

call() { # METHOD [FLAGS]: sends the JSON messages of stdin
    method=$1
    shift
    buf curl --protocol grpc --http2-prior-knowledge -d @- "$@" "http://$address/attencode.v1.Encoder/$method"
}

many() { # one request of 1,000 texts of some 80 tokens: seconds of work on a few cores
    text=$(yes 'time flies like an arrow' | head -n 16 | paste -sd ' ' -)
    printf '{"inputs": [%s], "pooled": {}}' "$(yes "{\"text\": \"$text\"}" | head -n 1000 | paste -sd , -)"
}

echo "== unary" # tensors are base64 of raw little-endian float32
echo '{"inputs": [{"text": "time flies"}], "pooled": {"dimensions": 4}}' | call Encode

echo "== stream" # an item that fails does not end it
call EncodeStream <<'END'
{"id": 1, "request": {"inputs": [{"text": "time flies"}], "pooled": {"dimensions": 4}}}
{"id": 2, "request": {"inputs": [{"text": ""}], "pooled": {"dimensions": 4}}}
END

echo "== error" # of two such requests at once the second finds the queue full, if that is short
many | call Encode >/dev/null 2>&1 &
sleep 0.5
many | call Encode 2>&1 >/dev/null
wait

echo "== deadline"
many | call Encode --timeout 1s 2>&1 >/dev/null || echo "exit code $?" # 8 times the status
