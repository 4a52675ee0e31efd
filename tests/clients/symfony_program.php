<?php
/*
 * Symfony Messenger over its SQS transport.
 *
 *     php symfony_program.php SETTINGS worker
 *     php symfony_program.php SETTINGS send JOB...
 *
 * SETTINGS and each JOB are JSON; tests/clients/test_sqs_workers.py says what is in them, and job.py what a job does.
 */

foreach (['Messenger/Bridge/AmazonSqs', 'Messenger', 'HttpClient'] as $component) {
    require_once "Symfony/Component/$component/autoload.php";
}

use Symfony\Component\Messenger\Bridge\AmazonSqs\Transport\AmazonSqsTransportFactory;
use Symfony\Component\Messenger\Envelope;
use Symfony\Component\Messenger\Handler\HandlersLocator;
use Symfony\Component\Messenger\MessageBus;
use Symfony\Component\Messenger\Middleware\HandleMessageMiddleware;
use Symfony\Component\Messenger\Transport\Serialization\PhpSerializer;
use Symfony\Component\Messenger\Worker;

class Job
{
    public function __construct(public array $given)
    {
    }
}

function note(string $kind, Job $job): void
{
    global $settings;
    file_put_contents($settings['record'], "$kind {$job->given['id']} ".getmypid()."\n", FILE_APPEND);
}

function work(Job $job): void
{
    note('begin', $job);
    $marker = $job->given['crash'] ?? null;
    if (null !== $marker && !file_exists($marker)) {
        touch($marker);
        posix_kill(getmypid(), SIGKILL);
    }
    note('done', $job);
}

$settings = json_decode($argv[1], true);
$query = http_build_query([
    'sslmode' => 'disable', 'region' => 'us-east-1', 'access_key' => getenv('AWS_ACCESS_KEY_ID'), 'secret_key' => getenv('AWS_SECRET_ACCESS_KEY'),
    'visibility_timeout' => $settings['visibility_seconds'], 'buffer_size' => 1,
]);
$address = preg_replace('#^https?://#', '', $settings['endpoint']);
$transport = (new AmazonSqsTransportFactory())->createTransport("sqs://$address/{$settings['queue']}?$query", [], new PhpSerializer());
if ('send' === $argv[2]) {
    foreach (array_slice($argv, 3) as $text) {
        $transport->send(new Envelope(new Job(json_decode($text, true))));
    }
} else {
    $bus = new MessageBus([new HandleMessageMiddleware(new HandlersLocator([Job::class => ['work']]))]);
    $worker = new Worker(['sqs' => $transport], $bus);
    pcntl_async_signals(true);
    pcntl_signal(SIGTERM, $worker->stop(...));
    $worker->run(['sleep' => 100_000]);
}
