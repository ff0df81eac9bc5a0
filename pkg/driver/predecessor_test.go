package driver

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/predecessor"
)

// writeCheckpoint writes a checkpoint of NVIDIA's DRA driver into the plugin directory and returns
// its path.
func (n *node) writeCheckpoint(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(n.cfg.PluginDir, predecessor.File)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func expectOffered(t *testing.T, n *node, want ...string) {
	t.Helper()
	var got []string
	eventually(t, fmt.Sprintf("%q are offered", want), func() bool {
		got = published(t, n.client)
		slices.Sort(got)
		return slices.Equal(got, want)
	})
}

func TestPredecessorClaimsWithholdTheirGPUs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	const uid = "aaaaaaaa-1111-4222-8333-444444444444"
	checkpoint := n.writeCheckpoint(t, `{"v2":{"preparedClaims":{"`+uid+`":{"checkpointState":"PrepareCompleted",
		"status":{"reservedFor":[{"resource":"pods","name":"trainer"}]},
		"preparedDevices":[{"devices":[{"gpu":{"info":{"uuid":"GPU-0000:1b:00.0"},"device":{"DeviceName":"gpu-0"}}}],"configState":{}}]}}}}`)
	spec := filepath.Join(n.cfg.CDIRoot, "k8s.gpu.nvidia.com-claim_"+uid+".yaml")
	if err := os.WriteFile(spec, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.start(t)
	n.register(t)
	expectOffered(t, n, secondGPU)
	n.expectEvent(t, "Node", "node", "GPUsWithheld", uid+" of Pod trainer holds gpu-0")

	early := n.claim(t, "early", firstGPU)
	if msg := n.prepare(t, early).GetError(); !strings.Contains(msg, uid) || !strings.Contains(msg, "NVIDIA's DRA driver") {
		t.Errorf("the error does not name the claim: %q", msg)
	}
	foreign := n.claim(t, "foreign", "gpu-0")
	if err := n.client.ResourceV1().ResourceClaims("team").Delete(t.Context(), "foreign", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	foreign = &drapb.Claim{Namespace: "team", Name: foreign.GetName(), Uid: uid}
	n.claimAs(t, foreign, "gpu-0")
	if msg := n.prepare(t, foreign).GetError(); !strings.Contains(msg, "NVIDIA's DRA driver prepared it") {
		t.Errorf("the claim itself fails with %q", msg)
	}
	if msg := n.prepare(t, n.claim(t, "other", secondGPU)).GetError(); msg != "" {
		t.Errorf("the other GPU is refused: %s", msg)
	}

	if msg := n.unprepare(t, foreign); msg != "" {
		t.Fatal(msg)
	}
	expectOffered(t, n, firstGPU, secondGPU)
	if msg := n.prepare(t, early).GetError(); msg != "" {
		t.Errorf("after its end: %s", msg)
	}
	if msg := n.unprepare(t, foreign); msg != "" {
		t.Errorf("unprepared twice: %s", msg)
	}
	for _, path := range []string{checkpoint, spec} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
}

func TestUnreadablePredecessorCheckpointWithholdsAllGPUs(t *testing.T) {
	n := newNode(t)
	path := n.writeCheckpoint(t, `{"v3":{}}`)
	n.start(t)
	n.register(t)
	n.expectEvent(t, "Node", "node", "GPUsWithheld", path)
	c := n.claim(t, "c", firstGPU)
	if msg := n.prepare(t, c).GetError(); !strings.Contains(msg, path) || !strings.Contains(msg, "move the file away") {
		t.Errorf("%q", msg)
	}
	if msg := n.unprepare(t, c); msg != "" {
		t.Errorf("it cannot be unprepared: %s", msg)
	}
	if got := published(t, n.client); len(got) != 0 {
		t.Errorf("offered: %q", got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if msg := n.prepare(t, c).GetError(); msg != "" {
		t.Errorf("after the file was removed: %s", msg)
	}
}
