package chart

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/settings"
)

// The plugin reads the configurations as the values have them. Fractions in one of them are enough
// for the MPS supervisor and the class of shares.
func TestConfigurationsReachThePlugin(t *testing.T) {
	const pool = `configurations={"few":{"nodeSelector":{"pool":"few"},"mig":{"policy":"dynamic"},"shares":[{"kind":"fractions"}],` +
		`"health":{"effects":{"degraded":"NoSchedule"}},"xidRules":{"79":"app"}}}`
	objects, _ := render(t, "--set-json", pool, "--set", "devicePluginLabel=true")
	document, err := settings.Parse([]byte(only[*corev1.ConfigMap](t, objects, plugin).Data["settings.yaml"]))
	if err != nil {
		t.Fatal(err)
	}
	for _, labels := range []map[string]string{{"pool": "few"}, {settings.Label: "few"}, {settings.DevicePluginLabel: "few"}} {
		if name, _, err := document.Choose(labels); name != "few" || err != nil {
			t.Errorf("labels %v choose %q, %v", labels, name, err)
		}
	}
	few := document.Of("few")
	if few.MIG.Policy != device.PolicyDynamic || len(few.Shares) != 1 || few.Health.Effects["degraded"] == "" || len(few.XIDRules) != 1 {
		t.Errorf("configuration few is %+v", few)
	}
	if other := document.Of(settings.Default); other.MIG.Policy != device.PolicyStatic || len(other.Shares) > 0 || len(other.XIDRules) > 0 {
		t.Errorf("the values for all nodes are %+v", other)
	}
	supervisor := strings.TrimSuffix(plugin, "kubelet-plugin") + "mps"
	only[*appsv1.DaemonSet](t, objects, supervisor)
	only[*resourceapi.DeviceClass](t, objects, "shared.gpu.nvidia.com")
	objects, _ = render(t, "--set-json", strings.Replace(pool, "fractions", "off", 1))
	for _, object := range objects {
		if name := object.(metav1.Object).GetName(); name == supervisor || name == "shared.gpu.nvidia.com" {
			t.Errorf("there is %s without shares", name)
		}
	}
}

func TestRefusesWrongConfigurations(t *testing.T) {
	for configurations, field := range map[string]string{
		`{"few":{"mig":{"policy":"frozen"}}}`:                  "/configurations/few/mig/policy",
		`{"few":{"mig":"static"}}`:                             "/configurations/few/mig",
		`{"few":{"shares":[{"kind":"halves"}]}}`:               "/configurations/few/shares/0/kind",
		`{"few":{"health":{"effects":{"unhealthy":"Evict"}}}}`: "/configurations/few/health/effects/unhealthy",
		`{"few":{"xidRules":{"79":"harmless"}}}`:               "/configurations/few/xidRules/79",
		`{"few":{"nodeSelectors":{}}}`:                         "nodeSelectors",
		`{"no label value":{}}`:                                "no label value",
		`{"default":{"mig":{"policy":"static"}}}`:              "default",
	} {
		_, err := template(t, "--set-json", "configurations="+configurations)
		if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), ".", "/"), field) {
			t.Errorf("%s: %v, want an error that names %s", configurations, err, field)
		}
	}
}
