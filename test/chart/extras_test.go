package chart

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestDeviceClassesHaveAdminsExtras(t *testing.T) {
	const extras = `"labels":{"team":"ml"},"annotations":{"owner":"a@example.com"},` +
		`"selectors":["device.attributes['gpu.nvidia.com'].productName != 'old'"],` +
		`"config":{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`
	objects, _ := render(t, "--set-json", twoShares, "--set-json", `deviceClasses={"gpu":{`+extras+`},"mig":{`+extras+`},"shared":{`+extras+
		`},"migProfiles":[{"profile":"1g.10gb",`+extras+`}]}`)
	for _, name := range []string{"gpu.nvidia.com", "mig.nvidia.com", "shared.gpu.nvidia.com", "mig-1g.10gb.nvidia.com"} {
		class := only[*resourceapi.DeviceClass](t, objects, name)
		if class.Labels["team"] != "ml" || class.Labels["app.kubernetes.io/name"] == "" || class.Annotations["owner"] != "a@example.com" {
			t.Errorf("%s has labels %v and annotations %v", name, class.Labels, class.Annotations)
		}
		if s := class.Spec.Selectors; len(s) != 2 || !strings.Contains(s[0].CEL.Expression, "device.driver") ||
			s[1].CEL.Expression != "device.attributes['gpu.nvidia.com'].productName != 'old'" {
			t.Errorf("%s has selectors %+v", name, s)
		}
		if c := class.Spec.Config; len(c) != 1 || c[0].Opaque.Driver != "gpu.nvidia.com" ||
			!strings.Contains(string(c[0].Opaque.Parameters.Raw), `"GpuConfig"`) {
			t.Errorf("%s has configuration %+v", name, c)
		}
	}
}

func TestCommonLabelsAreOnEveryObject(t *testing.T) {
	objects, _ := render(t, append(slices.Clone(everything), "--set", "commonLabels.team=ml")...)
	for _, object := range objects {
		m := object.(metav1.Object)
		if m.GetLabels()["team"] != "ml" {
			t.Errorf("%T %s has labels %v", object, m.GetName(), m.GetLabels())
		}
	}
	set := only[*appsv1.DaemonSet](t, objects, plugin)
	if set.Spec.Selector.MatchLabels["team"] != "" {
		t.Error("a common label is in the selector, which can never change")
	}
}

func TestExtraObjectsAreTemplates(t *testing.T) {
	objects, _ := render(t, "--set-json",
		`extraObjects=[{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"{{ .Release.Name }}-more"}}]`)
	only[*corev1.ConfigMap](t, objects, release+"-more")
}

func TestLabelledNodesOnly(t *testing.T) {
	objects, _ := render(t, "--set", "nodes=labelled", "--set", "mps.enabled=true", "--set-json",
		`affinity={"podAntiAffinity":{},"nodeAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[]}}`)
	want := []string{
		"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present",
		"feature.node.kubernetes.io/pci-0302_10de.present", "feature.node.kubernetes.io/pci-0300_10de.present",
	}
	for _, name := range []string{plugin, strings.TrimSuffix(plugin, "kubelet-plugin") + "mps"} {
		affinity := only[*appsv1.DaemonSet](t, objects, name).Spec.Template.Spec.Affinity
		var got []string
		for _, term := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			if e := term.MatchExpressions; len(e) == 1 && e[0].Operator == corev1.NodeSelectorOpIn && slices.Equal(e[0].Values, []string{"true"}) {
				got = append(got, e[0].Key)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s runs where one of %v is true, want %v", name, got, want)
		}
		if affinity.PodAntiAffinity == nil {
			t.Errorf("%s lost the user's affinity", name)
		}
	}
	if objects, _ = render(t); only[*appsv1.DaemonSet](t, objects, plugin).Spec.Template.Spec.Affinity != nil {
		t.Error("by default there is an affinity")
	}
	_, err := template(t, append(slices.Clone(everything), "--set", "nodes=labelled")...)
	if err == nil || !strings.Contains(err.Error(), "nodes: labelled makes the required node affinity") {
		t.Errorf("a second required affinity: %v", err)
	}
}
