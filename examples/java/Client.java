// A client of attencode for Java: one call, a stream, an error with its details, a deadline.
import attencode.v1.EncoderGrpc;
import attencode.v1.EncoderOuterClass.EncodeRequest;
import attencode.v1.EncoderOuterClass.EncodeResponse;
import attencode.v1.EncoderOuterClass.EncodeStreamRequest;
import attencode.v1.EncoderOuterClass.EncodeStreamResponse;
import attencode.v1.EncoderOuterClass.Input;
import attencode.v1.EncoderOuterClass.PooledOptions;
import com.google.protobuf.Any;
import com.google.rpc.RetryInfo;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

public class Client {
    private final ManagedChannel channel;

    Client(String address) {
        channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    }

    static EncodeRequest request(String... texts) {
        EncodeRequest.Builder request = EncodeRequest.newBuilder().setPooled(PooledOptions.getDefaultInstance());
        for (String text : texts) request.addInputs(Input.newBuilder().setText(text));
        return request.build();
    }

    void unary() {
        EncodeResponse answer = EncoderGrpc.newBlockingStub(channel).withDeadlineAfter(30, TimeUnit.SECONDS)
            .encode(request("time flies like an arrow", "fruit flies like a banana"));
        int size = (int) answer.getPooled().getShape(1);
        // A tensor is its shape and raw little-endian numbers.
        FloatBuffer numbers = answer.getPooled().getData().asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer();
        double cosine = 0; // the vectors have length 1
        for (int place = 0; place < size; place++) cosine += numbers.get(place) * numbers.get(size + place);
        System.out.printf("unary: %s, %d and %d tokens, cosine %.2f%n", answer.getPooled().getShapeList(),
            answer.getResults(0).getNumTokens(), answer.getResults(1).getNumTokens(), cosine);
    }

    // Items are answered in their order, and one that fails does not end the stream. Answers of more than 1 MiB come
    // in chunks behind their response (case CHUNK), which vectors never are.
    void stream() throws InterruptedException {
        CountDownLatch ended = new CountDownLatch(1);
        StreamObserver<EncodeStreamRequest> items = EncoderGrpc.newStub(channel).encodeStream(new StreamObserver<>() {
            public void onNext(EncodeStreamResponse item) {
                String told = item.hasError() ? "error " + item.getError().getCode() + ": " + item.getError().getMessage()
                    : item.getResponse().getPooled().getShapeList().toString();
                System.out.println("stream: item " + item.getId() + ": " + told);
            }

            public void onError(Throwable error) {
                System.out.println("stream: " + error.getMessage());
                ended.countDown();
            }

            public void onCompleted() {
                ended.countDown();
            }
        });
        String[] texts = {"time flies", "", "like an arrow"};
        for (int id = 0; id < texts.length; id++) {
            items.onNext(EncodeStreamRequest.newBuilder().setId(id).setRequest(request(texts[id])).build());
        }
        items.onCompleted();
        ended.await(30, TimeUnit.SECONDS);
    }

    // With more than fits into the queue, some of these are refused, with the time after which to try again.
    void error() throws Exception {
        String[] texts = new String[64];
        Arrays.fill(texts, "time flies like an arrow");
        List<Future<EncodeResponse>> calls = new ArrayList<>();
        for (int call = 0; call < 16; call++) {
            calls.add(EncoderGrpc.newFutureStub(channel).withDeadlineAfter(60, TimeUnit.SECONDS).encode(request(texts)));
        }
        StatusRuntimeException refused = null;
        for (Future<EncodeResponse> call : calls) {
            try {
                call.get();
            } catch (ExecutionException error) {
                refused = (StatusRuntimeException) error.getCause();
            }
        }
        if (refused == null) {
            System.out.println("error: none, the queue took all");
            return;
        }
        System.out.println("error: " + refused.getMessage());
        for (Any detail : StatusProto.fromThrowable(refused).getDetailsList()) {
            if (detail.is(RetryInfo.class)) {
                int nanos = detail.unpack(RetryInfo.class).getRetryDelay().getNanos();
                long seconds = detail.unpack(RetryInfo.class).getRetryDelay().getSeconds();
                System.out.printf("error: RetryInfo: %.3f s%n", seconds + nanos / 1e9);
            }
        }
    }

    void deadline() {
        try {
            EncoderGrpc.newBlockingStub(channel).withDeadlineAfter(1, TimeUnit.MICROSECONDS).encode(request("time flies"));
        } catch (StatusRuntimeException error) {
            System.out.println("deadline: " + error.getStatus().getCode());
        }
    }

    public static void main(String[] arguments) throws Exception {
        Client client = new Client(arguments.length > 0 ? arguments[0] : "127.0.0.1:50051");
        client.unary();
        client.stream();
        client.error();
        client.deadline();
        client.channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
}
