package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	"sigs.k8s.io/yaml"
)

const unvalidated = "gpu.nvidia.com/unvalidated=:NoSchedule"

// validationExample returns the objects of the example in docs/health.md, without its namespace,
// and its Job.
func (w *world) validationExample(t *testing.T, namespace string) (objects string, job batchv1.Job) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(w.root, "docs", "health.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		for part := range strings.SplitSeq(strings.ReplaceAll(block[1], "namespace: gpu-validation", "namespace: "+namespace), "---\n") {
			switch {
			case strings.Contains(part, "kind: Namespace"):
			case strings.Contains(part, "kind: Job"):
				if err := yaml.UnmarshalStrict([]byte(part), &job); err != nil {
					t.Fatal(err)
				}
			default:
				objects += "---\n" + part
			}
		}
	}
	if len(job.Spec.Template.Spec.InitContainers) != 1 || !strings.Contains(objects, "kind: ClusterRole") {
		t.Fatalf("docs/health.md has no example of a check: %s", objects)
	}
	return objects, job
}

// testUnvalidated does what the Job of docs/health.md does, with its claim, its script and its
// rights. The test's images have no kubectl.
func (w *world) testUnvalidated(t *testing.T) {
	w.needSMI(t)
	w.install(t, "--set", "requireValidation=true")
	u := w.tenant(t)
	objects, job := w.validationExample(t, u.namespace)
	w.apply(t, u.namespace, objects)
	u.gpus(1)
	for device := range w.devices(t, h100) {
		w.becomes(t, device, unvalidated)
	}
	w.schedulerKnowsSlices(t)
	u.pod("early", onNode(h100), fromTemplate("gpu", gpusTemplate(1)))
	u.waits("early")
	template := *job.Spec.Template.Spec.ResourceClaims[0].ResourceClaimTemplateName
	u.pod("check", onNode(h100), fromTemplate("gpu", template), container("main", "gpu"))
	u.running("check")
	checked := u.device("check")
	w.becomes(t, checked, unvalidated)

	<-time.After(time.Second) // the annotation's precision
	check := job.Spec.Template.Spec.InitContainers[0]
	result := check.VolumeMounts[0].MountPath
	annotations := strings.Fields(u.sh("check", "main", "mkdir -p "+result+"; "+strings.Join(check.Args, "\n")+"\ncat "+result+"/annotations"))
	annotations = annotations[len(annotations)-1:] // after nvidia-smi's table
	u.remove("check")
	as := fmt.Sprintf("system:serviceaccount:%s:%s", u.namespace, job.Spec.Template.Spec.ServiceAccountName)
	if _, err := w.Kubectl(t.Context(), append([]string{"--as", as, "annotate", "--overwrite", "node", h100}, annotations...)...); err != nil {
		t.Fatal(err)
	}
	u.running("early")
	if got := u.device("early"); got != checked {
		t.Errorf("the Pod without toleration got %s, want the checked GPU %s", got, checked)
	}

	w.restartPlugin(t, h100)
	w.becomes(t, checked)
	for device, taints := range w.taints(t, h100) {
		if gpu, _, _ := strings.Cut(device, "-mig-"); gpu == checked {
			t.Errorf("after the plugin's restart %s has the taints %v", device, taints)
		}
	}
	u.running("early")

	u.remove("early")
	w.nvmlsim(t, h100, "reset", busOf(checked))
	w.becomes(t, checked, unvalidated)
}
