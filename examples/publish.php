<?php
// Publishes an event to Fairlane, with PHP only.
//
//     FAIRLANE=http://127.0.0.1:8080 php publish.php BOT TYPE [DATA]
//
// If auth.tokens has tokens, set TOKEN in the environment to one of them. DATA is JSON.

/** Prints the error and exits. */
function stop(string $why): never
{
    fwrite(STDERR, "$why\n");
    exit(1);
}

/** Returns once all events are on the bus, or exits with the error. After a refusal, none of them
 * is on the bus. After any other failure, send the same events again: receivers recognise repeated
 * events by their ids. */
function publish(array $events): array
{
    $headers = ['content-type: application/cloudevents-batch+json'];
    if ($token = getenv('TOKEN')) {
        $headers[] = "authorization: Bearer $token";
    }
    $request = stream_context_create(['http' => [
        'method' => 'POST', 'header' => $headers, 'content' => json_encode($events),
        'timeout' => 10, 'ignore_errors' => true,
    ]]);
    $url = (getenv('FAIRLANE') ?: 'http://127.0.0.1:8080') . '/v1/events';
    for ($attempt = 0; $attempt < 5; $attempt++) {
        $answer = @file_get_contents($url, false, $request);
        $head = $answer === false ? [] : $http_response_header;
        $code = (int) (explode(' ', $head[0] ?? '')[1] ?? 0);
        if ($code === 202) {
            return json_decode($answer, true);
        }
        // 429 and 503: retry later. Any other status: the answer says what is wrong with the
        // events.
        if ($code !== 0 && $code !== 429 && $code !== 503) {
            stop("$code: $answer");
        }
        $later = preg_grep('/^retry-after:/i', $head);
        sleep($later ? (int) explode(':', reset($later))[1] : 2 ** $attempt);
    }
    stop("no answer in five attempts");
}

if ($argc < 3 || $argc > 4) {
    stop("php publish.php BOT TYPE [DATA]");
}
$data = json_decode($argv[3] ?? 'null');
if (json_last_error() !== JSON_ERROR_NONE) {
    stop('DATA is not JSON: ' . json_last_error_msg());
}
$event = [
    'specversion' => '1.0', 'id' => bin2hex(random_bytes(16)), 'source' => 'publish.php',
    'type' => $argv[2], 'botid' => $argv[1], 'data' => $data,
];
echo json_encode(publish([$event])), "\n";
