package driver

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// events returns the Events about the object, each as "REASON: MESSAGE".
func (n *node) events(t *testing.T, kind, name string) []string {
	t.Helper()
	list, err := n.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, e := range list.Items {
		if e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == name {
			texts = append(texts, e.Reason+": "+e.Message)
		}
	}
	return texts
}

func (n *node) expectEvent(t *testing.T, kind, name, reason, part string) {
	t.Helper()
	eventually(t, reason+" with "+part, func() bool {
		return slices.ContainsFunc(n.events(t, kind, name), func(e string) bool {
			return strings.HasPrefix(e, reason+": ") && strings.Contains(e, part)
		})
	})
}

func TestEachUnavailableReasonIsAnEvent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	lacks := func(what string) func() (nvidia.Node, error) {
		return func() (nvidia.Node, error) { return nvidia.Node{}, &nvidia.NotReadyError{Reason: what} }
	}
	n.setHardware("one", lacks("no library"))
	n.start(t)
	n.expectEvent(t, "Node", "node", "DevicesUnavailable", "no library")
	n.setHardware("two", lacks("no device node"))
	n.expectEvent(t, "Node", "node", "DevicesUnavailable", "no device node")
	n.setHardware("three", twoGPUs)
	n.expectEvent(t, "Node", "node", "DevicesAvailable", "2 GPUs")
}

func TestFailedUnprepareIsAnEvent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t)
	n.register(t)
	eventually(t, "both GPUs are published", func() bool { return len(published(t, n.client)) == 2 })
	c := n.claim(t, "c", "gpu-0000-1b-00-0")
	if answer := n.prepare(t, c); answer.GetError() != "" {
		t.Fatal(answer.GetError())
	}
	record := filepath.Join(n.cfg.StateDir(), "claims", c.GetUid()+"_gpu-0000-1b-00-0.json")
	if err := os.WriteFile(record, []byte(`{"minReader":99}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if n.unprepare(t, c) == "" {
		t.Fatal("unprepared a claim whose record is unreadable")
	}
	n.expectEvent(t, "ResourceClaim", "c", "UnprepareFailed", "format version 99")
}
