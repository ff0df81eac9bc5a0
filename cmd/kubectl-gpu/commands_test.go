package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// archiveOf writes an archive of a cluster in which the Pod p waits for the GPU of the claim train.
func archiveOf(t *testing.T) string {
	t.Helper()
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 1, "static", "")
	c.Held("train", "n1", fleettest.Device(0))
	c.Claim("want", fleettest.Request("gpu", "gpu.nvidia.com", 1))
	c.Pod("p", "want")
	s := &fleet.Snapshot{Version: "v1.37.0", Nodes: c.Nodes, Slices: c.Slices, Claims: c.Claims, Classes: c.Classes, Pods: c.Pods}
	path := filepath.Join(t.TempDir(), "gather.tar.gz")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.WriteArchive(f, fleet.ArchiveOptions{Program: "test", Time: time.Unix(0, 0), Pods: true}); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// run runs the program with these arguments.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out, errOut strings.Builder
	c := newCommand(&out, &errOut)
	c.SetArgs(args)
	err := c.ExecuteContext(t.Context())
	return out.String() + errOut.String(), err
}

func TestCommands(t *testing.T) {
	archive := archiveOf(t)
	for _, c := range []struct {
		args string
		want string
		err  string
	}{
		{"explain pod p -n team-a", "delete team-a/train-pod, which has claim team-a/train", ""},
		{"explain claim want -n team-a", "Pod team-a/p waits with this claim", ""},
		{"explain claim train -n team-a", "Claim team-a/train has 1 device", ""},
		{"explain pod p", "", "pod default/p does not exist: name its namespace with -n"},
		{"explain claim p", "", "claim default/p does not exist: name its namespace with -n"},
		{"explain node n1", "", `"node" is neither pod nor claim`},
		{"explain pod p -n team-a -o xml", "", `output "xml" is unknown`},
		{"status", "n1     1      0      1", ""},
		{"status n1", "[aaaaaaaa]", ""},
		{"status -o wide", "[aaaaaaaa]", ""},
		{"status n2", "", "node n2 does not exist"},
		{"doctor", "The driver's DaemonSet is not installed", "findings"},
		{"migrate check", "Nothing would change.", ""},
		{"__complete explain pod ", "p\n", ""},
		{"__complete status ", "n1\n", ""},
		{"completion bash", "kubectl-gpu", ""},
		{"slices n1 --for karpenter", "kind: DynamicResourceTemplate", ""},
		{"slices n1 --for cluster-autoscaler", "nodeName: gpu-node-template", ""},
		{"slices t4-16gb --for cluster-autoscaler --gpus 2 --name g4dn -o json", `"name": "gpu-0000-11-00-0"`, ""},
		{"slices a100-sxm4-40gb --for karpenter --mig-policy dynamic", "Note: gpu-0000-10-00-0: ", ""},
		{"gather --logs 5", "", "--logs needs a cluster"},
		{"gather --logs -1", "", "use a number of lines"},
		{"slices n1 --for kueue", "", `--for is "kueue": use karpenter or cluster-autoscaler`},
		{"slices n1 --for karpenter --gpus 2", "", "n1 is no model, and --gpus is for models"},
		{"slices n2 --for karpenter", "", "n2 is neither a node nor a model"},
		{"slices ./none.yaml --for karpenter", "", "no such file"},
		{"slices t4-16gb --for karpenter --mig-policy fast", "", "fast"},
	} {
		t.Run(c.args, func(t *testing.T) {
			args := append([]string{}, strings.Split(c.args, " ")...)
			if args[0] == "__complete" {
				args = append([]string{"__complete", "--archive", archive, "-n", "team-a"}, args[1:]...)
			} else {
				args = append(args, "--archive", archive)
			}
			out, err := run(t, args...)
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if !strings.Contains(out, c.want) {
				t.Errorf("lacks %q:\n%s", c.want, out)
			}
		})
	}
}

func TestStructuredOutput(t *testing.T) {
	archive := archiveOf(t)
	for _, command := range [][]string{{"explain", "pod", "p", "-n", "team-a"}, {"status"}, {"doctor"}} {
		for format, decode := range map[string]func([]byte, any) error{
			"json": json.Unmarshal, "yaml": func(text []byte, into any) error { return yaml.Unmarshal(text, into) },
		} {
			out, err := run(t, append(command, "--archive", archive, "-o", format)...)
			if err != nil && !errors.Is(err, errFindings) {
				t.Fatal(err)
			}
			var v map[string]any
			if err := decode([]byte(out), &v); err != nil || len(v) == 0 {
				t.Errorf("%v as %s: %v\n%s", command, format, err, out)
			}
		}
	}
}

// An archive of an archive answers as the first one does.
func TestGatherFromArchive(t *testing.T) {
	archive, second := archiveOf(t), filepath.Join(t.TempDir(), "second.tar.gz")
	if out, err := run(t, "gather", "--archive", archive, "-f", second, "--pods"); err != nil ||
		!strings.Contains(out, "resourceslices.json") {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := run(t, "gather", "--archive", archive, "-f", second); !errors.Is(err, os.ErrExist) {
		t.Errorf("gather replaced an existing file: %v", err)
	}
	first, err := run(t, "explain", "pod", "p", "-n", "team-a", "--archive", archive)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := run(t, "explain", "pod", "p", "-n", "team-a", "--archive", second); err != nil || again != first {
		t.Errorf("%v\n%s\nwant\n%s", err, again, first)
	}
}

func TestKubeconfigThatIsMissing(t *testing.T) {
	_, err := run(t, "status", "--kubeconfig", filepath.Join(t.TempDir(), "none"))
	if err == nil || !strings.Contains(err.Error(), "read the kubeconfig") {
		t.Error(err)
	}
}
