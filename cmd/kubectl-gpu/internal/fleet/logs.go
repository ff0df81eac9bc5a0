package fleet

import (
	"context"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// Limits for the logs of one container, and of all together.
const (
	maxLog  = 1 << 20
	maxLogs = 64 << 20
)

// Log is the end of the log of one container of the driver's Pods.
type Log struct {
	// Name is the Pod's and container's name, with "previous" for the container before a restart.
	Name string
	Text []byte
}

// ReadLogs reads the last lines of the logs of all containers of the driver, with secrets removed.
// missing says which logs could not be read.
func ReadLogs(ctx context.Context, client kubernetes.Interface, lines int64) (all []Log, missing []string) {
	pods, err := client.CoreV1().Pods("").List(ctx, metav1.ListOptions{LabelSelector: pluginSelector})
	if err != nil {
		return nil, []string{fmt.Sprintf("logs of the driver: %v", err)}
	}
	var lock sync.Mutex
	total := 0
	group := errgroup.Group{}
	group.SetLimit(8)
	for _, p := range pods.Items {
		for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
			for _, previous := range []bool{false, true} {
				if previous && c.RestartCount == 0 {
					continue
				}
				name := p.Name + "_" + c.Name
				if previous {
					name += "_previous"
				}
				group.Go(func() error {
					text, err := readLog(ctx, client, &p, &corev1.PodLogOptions{
						Container: c.Name, Previous: previous, TailLines: &lines, LimitBytes: ptr.To[int64](maxLog), Timestamps: true,
					})
					lock.Lock()
					defer lock.Unlock()
					switch {
					case err != nil:
						missing = append(missing, fmt.Sprintf("log %s: %v", name, err))
					case total+len(text) > maxLogs:
						missing = append(missing, fmt.Sprintf("log %s: all logs together have more than %d bytes", name, maxLogs))
					default:
						total += len(text)
						all = append(all, Log{name, text})
					}
					return nil
				})
			}
		}
	}
	_ = group.Wait() // no function returns an error
	slices.SortFunc(all, func(a, b Log) int { return strings.Compare(a.Name, b.Name) })
	slices.Sort(missing)
	return all, missing
}

func readLog(ctx context.Context, client kubernetes.Interface, p *corev1.Pod, o *corev1.PodLogOptions) ([]byte, error) {
	stream, err := client.CoreV1().Pods(p.Namespace).GetLogs(p.Name, o).Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = stream.Close() }()
	text, err := io.ReadAll(io.LimitReader(stream, maxLog))
	return redact(text), err
}

// secrets match what no log should have: tokens, and values that are named as secret.
var secrets = []struct {
	pattern     *regexp.Regexp
	replacement string
}{
	{regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`), "REDACTED"},
	{regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9+/=_.~-]{8,}`), "$1 REDACTED"},
	{regexp.MustCompile(`(?i)((?:password|passwd|secret|token|api[-_]?key|credentials?)["']?\s*[=:]\s*)("[^"]*"|[^\s,;"]+)`), "${1}REDACTED"},
	{regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)`), "REDACTED"},
	{regexp.MustCompile(`(\w+://)[^/\s:@]+:[^/\s@]+@`), "${1}REDACTED@"},
}

// redact removes secrets from a log. The driver logs none, but a log may quote what others wrote.
func redact(text []byte) []byte {
	for _, s := range secrets {
		text = s.pattern.ReplaceAll(text, []byte(s.replacement))
	}
	return text
}
