package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// waiting is a cluster in which the Pod p waits for the GPU of the claim train.
func waiting() *fleettest.Cluster {
	c := fleettest.New()
	c.Node("n1", fleettest.H100, 1, "static", "")
	c.Held("train", "n1", fleettest.Device(0))
	c.Claim("want", fleettest.Request("gpu", "gpu.nvidia.com", 1))
	c.Pod("p", "want")
	return c
}

// archiveOf writes an archive of the cluster.
func archiveOf(t *testing.T, c *fleettest.Cluster) string {
	t.Helper()
	return write(t, &fleet.Snapshot{Version: "v1.37.0", Nodes: c.Nodes, Slices: c.Slices, Claims: c.Claims, Classes: c.Classes, Pods: c.Pods})
}

func write(t *testing.T, s *fleet.Snapshot) string {
	t.Helper()
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

// The sessions in the documentation are what the program says.
func TestDocumentationShowsRealOutput(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "kubectl-gpu.md"))
	if err != nil {
		t.Fatal(err)
	}
	for heading, build := range map[string]func(*fleettest.Cluster, *fleet.Snapshot){
		"## A first look\n": func(c *fleettest.Cluster, _ *fleet.Snapshot) {
			c.Node("n1", fleettest.H100, 2, "static", "")
			c.Held("train-1", "n1", fleettest.Device(0))
			c.Held("train-2", "n1", fleettest.Device(1))
		},
		"## On call\n": func(c *fleettest.Cluster, s *fleet.Snapshot) {
			const id1g, id3g = 19, 9 // profile IDs of an H100
			c.Node("n1", fleettest.H100, 2, "dynamic", "")
			c.Node("n2", fleettest.H100, 1, "dynamic", "")
			c.Held("notebook", "n1", fleettest.Device(0, id3g, 0))
			c.Held("test", "n1", fleettest.Device(0, id1g, 6))
			c.Held("train", "n1", fleettest.Device(1))
			c.Pods = c.Pods[1:] // the claim notebook has no Pod
			c.Taint("n2", "", "gpu.nvidia.com/not-ready", "cdi-disabled", resourceapi.DeviceTaintEffectNoSchedule)
			s.Gates = map[string]bool{fleet.GatePartitions: true}
			s.DaemonSets = []*appsv1.DaemonSet{{ObjectMeta: metav1.ObjectMeta{Name: "gpu-kubelet-plugin", Labels: map[string]string{
				"app.kubernetes.io/name": "gpu-dra-driver", "app.kubernetes.io/component": "kubelet-plugin",
			}}}}
			p := c.Pod("old")
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"nvidia.com/mig-1g.10gb": resource.MustParse("1")}
		},
	} {
		c, s := fleettest.New(), &fleet.Snapshot{Version: "v1.37.0"}
		build(c, s)
		c.Claim("want", fleettest.Request("gpu", "gpu.nvidia.com", 1))
		c.Pod("p", "want")
		s.Nodes, s.Slices, s.Claims, s.Classes, s.Pods = c.Nodes, c.Slices, c.Claims, c.Classes, c.Pods
		archive := write(t, s)
		_, section, _ := strings.Cut(string(page), heading)
		section, _, _ = strings.Cut(section, "\n## ")
		sessions := strings.Split(section, "\n    $ kubectl gpu ")[1:]
		if len(sessions) == 0 {
			t.Errorf("%s has no session", heading)
		}
		for _, session := range sessions {
			command, _, _ := strings.Cut(session, "\n")
			out, err := run(t, append(strings.Fields(command), "--archive", archive)...)
			if err != nil && !errors.Is(err, errFindings) {
				t.Errorf("%s: %v", command, err)
			}
			want := strings.ReplaceAll(command+"\n"+strings.TrimSpace(out), "\n", "\n    ")
			if want = strings.ReplaceAll(want, "    \n", "\n"); !strings.HasPrefix(session, want+"\n") {
				t.Errorf("docs/kubectl-gpu.md says\n%s\nbut the program says\n    %s", session, want)
			}
		}
	}
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
	archive := archiveOf(t, waiting())
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
		{"explain node n1", "", `"node" is neither pod nor claim. Usage: kubectl gpu explain pod|claim NAME`},
		{"explain pod", "", "received 1. Usage: kubectl gpu explain pod|claim NAME"},
		{"explain pod team-a/p", "delete team-a/train-pod", ""},
		{"explain claim team-a/p", "", "claim team-a/p does not exist"},
		{"explain --pod p", "", "unknown flag: --pod. Usage: kubectl gpu explain"},
		{"migrate", "kubectl gpu migrate [command]", ""},
		{"migrate everything", "", `unknown command "everything" for "kubectl gpu migrate"`},
		{"gather --max-bytes 0", "", "use a number of bytes"},
		{"explain pod p -n team-a -o xml", "", `output "xml" is unknown`},
		{"status", "n1     1      0      1", ""},
		{"status n1", "[aaaaaaaa]", ""},
		{"status -o wide", "[aaaaaaaa]", ""},
		{"status n2", "", "node n2 does not exist"},
		{"doctor", "The driver's DaemonSet is not installed", "findings"},
		{"migrate check", "Nothing would change.", ""},
		{"__complete explain pod ", "p\n", ""},
		{"__complete explain resourceclaim ", "want\n", ""},
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
	archive := archiveOf(t, waiting())
	for _, command := range [][]string{
		{"explain", "pod", "p", "-n", "team-a"}, {"status"}, {"doctor"}, {"migrate", "check"},
		{"slices", "t4-16gb", "--for", "karpenter"}, {"gather"},
	} {
		t.Chdir(t.TempDir())
		for format, decode := range map[string]func([]byte, any) error{
			"json": json.Unmarshal, "yaml": func(text []byte, into any) error { return yaml.Unmarshal(text, into) },
		} {
			args := append(slices.Clone(command), "--archive", archive, "-o", format)
			if command[0] == "gather" {
				args = append(args, "-f", format)
			}
			out, err := run(t, args...)
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
	archive, second := archiveOf(t, waiting()), filepath.Join(t.TempDir(), "second.tar.gz")
	if out, err := run(t, "gather", "--archive", archive, "-f", second, "--pods"); err != nil ||
		!strings.Contains(out, "resourceslices.json") {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := run(t, "gather", "--archive", archive, "-f", second); !errors.Is(err, os.ErrExist) ||
		!strings.Contains(err.Error(), "with -f") {
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
	t.Setenv("HOME", t.TempDir())
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	if _, err := run(t, "status"); err == nil || !strings.Contains(err.Error(), "or read an archive with --archive") {
		t.Error(err)
	}
}

// kubectl completes "kubectl gpu" by running kubectl_complete-gpu, which is a link to the program.
func TestCompletionForKubectl(t *testing.T) {
	archive := archiveOf(t, waiting())
	out, err := run(t, arguments([]string{"/bin/kubectl_complete-gpu", "--archive", archive, "status", ""})...)
	if err != nil || !strings.HasPrefix(out, "n1\n") {
		t.Errorf("%v: %s", err, out)
	}
	if got := arguments([]string{"/bin/kubectl-gpu", "status"}); !slices.Equal(got, []string{"status"}) {
		t.Errorf("%v", got)
	}
}
