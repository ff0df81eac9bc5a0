package fleet

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
)

func TestRedactRemovesSecretsOnly(t *testing.T) {
	for text, want := range map[string]string{
		"Prepared claim team-a/train uid=7d3f":                                      "Prepared claim team-a/train uid=7d3f",
		"Authorization: Bearer abcdefghijkl":                                        "Authorization: Bearer REDACTED",
		"token eyJhbGciOiJSUzI1.eyJpc3MiOiJrdWJl.c2lnbmF0dXJl end":                  "token REDACTED end",
		`password="a b" next=1`:                                                     "password=REDACTED next=1",
		"api_key: 12345, gpu=0":                                                     "api_key: REDACTED, gpu=0",
		"GET https://user:pass@host/path":                                           "GET https://REDACTED@host/path",
		"a\n-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nb": "a\nREDACTED\nb",
		"-----BEGIN PRIVATE KEY-----\ncut off":                                      "REDACTED",
	} {
		if got := string(redact([]byte(text))); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}

// The logs of the driver's containers are in the archive, also those before a restart. Logs of
// other Pods are not.
func TestLogsInTheArchive(t *testing.T) {
	pod := func(name, app string, restarts int32) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: name, Labels: map[string]string{"app.kubernetes.io/name": app}},
			Status:     corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "plugin", RestartCount: restarts}}},
		}
	}
	client := fake.NewClientset(pod("p1", "gpu-dra-driver", 0), pod("p2", "gpu-dra-driver", 3), pod("other", "web", 0))
	logs, missing := ReadLogs(t.Context(), client, 10)
	if len(missing) > 0 || len(logs) != 3 || logs[2].Name != "p2_plugin_previous" {
		t.Fatalf("%v, %v", logs, missing)
	}
	var archive bytes.Buffer
	m, err := (&Snapshot{}).WriteArchive(&archive, ArchiveOptions{Time: time.Unix(0, 0), Logs: logs})
	if err != nil {
		t.Fatal(err)
	}
	if f := m.Files[len(m.Files)-1]; f.Name != "logs/p2_plugin_previous.log" || f.Bytes != len(logs[2].Text) {
		t.Errorf("%+v", f)
	}
	zip, err := gzip.NewReader(&archive)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for files := tar.NewReader(zip); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(files)
		found[h.Name] = string(text)
	}
	if !strings.Contains(found["gpu-gather/logs/p1_plugin.log"], "fake logs") {
		t.Errorf("%v", found)
	}
	if _, err := (&Snapshot{}).WriteArchive(io.Discard, ArchiveOptions{Logs: logs, MaxBytes: 60}); err != nil {
		t.Error(err)
	}
}

func TestLogsThatCannotBeReadAreNamed(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("list", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("forbidden")
	})
	if logs, missing := ReadLogs(t.Context(), client, 10); len(logs) > 0 || len(missing) != 1 || !strings.Contains(missing[0], "forbidden") {
		t.Errorf("%v, %v", logs, missing)
	}
}
