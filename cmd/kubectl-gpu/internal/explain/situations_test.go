package explain_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	versionpkg "k8s.io/apimachinery/pkg/version"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// read returns the cluster as the program would read it.
func read(t *testing.T, c *fleettest.Cluster, version string) *fleet.Snapshot {
	t.Helper()
	client := fake.NewClientset(c.Objects()...)
	client.Discovery().(*fakediscovery.FakeDiscovery).FakedServerVersion = &versionpkg.Info{GitVersion: version}
	s, err := fleet.Read(t.Context(), client, func(context.Context) ([]byte, error) { return nil, errors.New("no metrics") })
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// archived returns the snapshot after a way through an archive.
func archived(t *testing.T, s *fleet.Snapshot) *fleet.Snapshot {
	t.Helper()
	var b bytes.Buffer
	if _, err := s.WriteArchive(&b, fleet.ArchiveOptions{Time: time.Unix(0, 0), Pods: true}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "a.tar.gz")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := fleet.ReadArchive(path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func ask(t *testing.T, s *fleet.Snapshot, what string) *explain.Report {
	t.Helper()
	e := explain.New(s)
	kind, name, _ := strings.Cut(what, " ")
	f := e.Pod
	if kind == "claim" {
		f = e.Claim
	}
	r, err := f(t.Context(), fleettest.Namespace, name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Each situation is read from a fake API server and from an archive, and both give one report.
func TestSituations(t *testing.T) {
	if len(situations) < 40 {
		t.Errorf("%d situations", len(situations))
	}
	for _, c := range situations {
		t.Run(c.name, func(t *testing.T) {
			cluster := fleettest.New()
			c.build(cluster)
			version := c.version
			if version == "" {
				version = "v1.37.0"
			}
			s := read(t, cluster, version)
			what := c.ask
			if what == "" {
				what = "pod p"
			}
			r := ask(t, s, what)
			if len(c.want) == 0 {
				t.Error("no sentence is expected")
			}
			if diff := cmp.Diff(r, ask(t, archived(t, s), what),
				cmpopts.IgnoreUnexported(explain.Report{}, explain.Node{}, explain.Change{})); diff != "" {
				t.Errorf("from an archive: %s", diff)
			}
			var text strings.Builder
			r.Text(&text, false)
			if r.State != c.state {
				t.Errorf("state is %s, want %s", r.State, c.state)
			}
			for _, want := range c.want {
				if !strings.Contains(text.String(), want) {
					t.Errorf("lacks: %s", want)
				}
			}
			for _, not := range c.not {
				if strings.Contains(text.String(), not) {
					t.Errorf("has: %s", not)
				}
			}
			if t.Failed() || testing.Verbose() {
				t.Logf("\n%s", text.String())
			}
		})
	}
}

// Without the right to read Pods and classes there is an answer only about allocated claims, and it
// does not call a claim unused that is reserved for a Pod.
func TestAnswersWithoutRights(t *testing.T) {
	c := fleettest.New()
	c.Node("n1", h100, 1, "static", "")
	c.Held("train", "n1", gpu0)
	wants(c, gpus(1))
	for _, missing := range []string{"Pods: forbidden", "DeviceClasses: forbidden"} {
		s := read(t, c, "v1.37.0")
		s.Missing = []string{missing}
		if s.Lacks(fleet.Pods) {
			s.Pods = nil
		}
		e := explain.New(s)
		for what, ask := range map[string]func(context.Context, string, string) (*explain.Report, error){"p": e.Pod, "want": e.Claim} {
			if _, err := ask(t.Context(), fleettest.Namespace, what); err == nil || !strings.Contains(err.Error(), missing) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if r := ask(t, s, "claim train"); r.Summary != "Claim team-a/train has 1 device, for team-a/train-pod." {
			t.Error(r.Summary)
		}
	}
}
