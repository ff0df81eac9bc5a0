package chart

import (
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"
	dracel "k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// expression is a CEL expression as the API server's compiler wants to be given it.
type expression struct {
	name, text string
	returns    *cel.Type
}

func (e expression) GetName() string          { return e.name }
func (e expression) GetExpression() string    { return e.text }
func (e expression) ReturnTypes() []*cel.Type { return []*cel.Type{e.returns} }

// policy is the chart's ValidatingAdmissionPolicy, compiled as the oldest supported API server does it.
type policy struct {
	conditions, validations plugincel.ConditionEvaluator
	messages                []string
}

func compile(t *testing.T, p *admissionregistrationv1.ValidatingAdmissionPolicy) policy {
	t.Helper()
	compiler, err := plugincel.NewCompositedCompiler(environment.MustBaseEnvSet(version.MustParseGeneric("1.34")))
	if err != nil {
		t.Fatal(err)
	}
	var declared plugincel.OptionalVariableDeclarations
	for _, v := range p.Spec.Variables {
		if result := compiler.CompileAndStoreVariable(expression{v.Name, v.Expression, cel.AnyType}, declared, environment.NewExpressions); result.Error != nil {
			t.Errorf("variable %s: %v", v.Name, result.Error)
		}
	}
	var conditions, validations, messages []plugincel.ExpressionAccessor
	var compiled policy
	for _, c := range p.Spec.MatchConditions {
		conditions = append(conditions, expression{c.Name, c.Expression, cel.BoolType})
	}
	for _, v := range p.Spec.Validations {
		validations = append(validations, expression{"", v.Expression, cel.BoolType})
		compiled.messages = append(compiled.messages, v.Message)
		if v.MessageExpression != "" {
			messages = append(messages, expression{"", v.MessageExpression, cel.StringType})
		}
	}
	compiled.conditions = compiler.CompileCondition(conditions, declared, environment.NewExpressions)
	compiled.validations = compiler.CompileCondition(validations, declared, environment.NewExpressions)
	for _, errs := range [][]error{
		compiled.conditions.CompilationErrors(), compiled.validations.CompilationErrors(),
		compiler.CompileCondition(messages, declared, environment.NewExpressions).CompilationErrors(),
	} {
		for _, err := range errs {
			if err != nil {
				t.Error(err)
			}
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	return compiled
}

// verdict is "" for an allowed request, else the messages of the validations that refuse it.
func (p policy) verdict(t *testing.T, who user.Info, object, old *resourceapi.ResourceSlice) string {
	t.Helper()
	operation := admission.Update
	switch {
	case old == nil:
		operation = admission.Create
	case object == nil:
		operation = admission.Delete
	}
	kind := resourceapi.SchemeGroupVersion.WithKind("ResourceSlice")
	resource := resourceapi.SchemeGroupVersion.WithResource("resourceslices")
	attributes := &admission.VersionedAttributes{VersionedKind: kind}
	var objectOrNil, oldOrNil runtime.Object
	if object != nil {
		objectOrNil = object
		attributes.VersionedObject.Set(object)
	}
	if old != nil {
		oldOrNil = old
		attributes.VersionedOldObject.Set(old)
	}
	attributes.Attributes = admission.NewAttributesRecord(objectOrNil, oldOrNil, kind, "", "slice", resource, "", operation, nil, false, who)
	request := plugincel.CreateAdmissionRequest(attributes.Attributes, metav1.GroupVersionResource(resource), metav1.GroupVersionKind(kind))
	if !p.all(t, p.conditions, attributes, request, nil) {
		return ""
	}
	refused := ""
	p.all(t, p.validations, attributes, request, func(i int) { refused += p.messages[i] })
	return refused
}

func (p policy) all(t *testing.T, e plugincel.ConditionEvaluator, attributes *admission.VersionedAttributes, request *admissionv1.AdmissionRequest, no func(int)) bool {
	t.Helper()
	results, _, err := e.ForInput(t.Context(), attributes, request, plugincel.OptionalVariableBindings{}, nil, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	all := true
	for i, result := range results {
		if result.Error != nil {
			t.Fatalf("evaluate %q: %v", result.ExpressionAccessor.GetExpression(), result.Error)
		}
		if result.EvalResult.Value() != true {
			all = false
			if no != nil {
				no(i)
			}
		}
	}
	return all
}

func slice(node *string, driver string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}, Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: node}}
}

func account(name, node string) user.Info {
	extra := map[string][]string{}
	if node != "" {
		extra["authentication.kubernetes.io/node-name"] = []string{node}
	}
	return &user.DefaultInfo{Name: "system:serviceaccount:" + namespace + ":" + name, Extra: extra}
}

func TestAPluginWritesOnlyItsOwnNodesSlices(t *testing.T) {
	objects, _ := render(t)
	p := compile(t, only[*admissionregistrationv1.ValidatingAdmissionPolicy](t, objects, plugin))
	var (
		a, b     = ptr.To("node-a"), ptr.To("node-b")
		mine     = slice(a, "gpu.nvidia.com")
		theirs   = slice(b, "gpu.nvidia.com")
		nobodys  = slice(nil, "gpu.nvidia.com")
		foreign  = slice(a, "tpu.example.com")
		me       = account(plugin, "node-a")
		unbound  = account(plugin, "")
		someone  = account("default", "node-b")
		ownNode  = "own node"
		noNode   = "bound to no node"
		ownDrive = "driver gpu.nvidia.com"
	)
	for name, c := range map[string]struct {
		who         user.Info
		object, old *resourceapi.ResourceSlice
		want        string // part of the message; empty: allowed
	}{
		"creates its own":                      {me, mine, nil, ""},
		"updates its own":                      {me, mine, mine, ""},
		"deletes its own":                      {me, nil, mine, ""},
		"creates another node's":               {me, theirs, nil, ownNode},
		"updates another node's":               {me, theirs, theirs, ownNode},
		"deletes another node's":               {me, nil, theirs, ownNode},
		"moves its own to another node":        {me, theirs, mine, ownNode},
		"takes another node's over":            {me, mine, theirs, ownNode},
		"creates one of no node":               {me, nobodys, nil, ownNode},
		"speaks for another driver":            {me, foreign, nil, ownDrive},
		"deletes another driver's":             {me, nil, foreign, ownDrive},
		"has a token that no node has":         {unbound, mine, nil, noNode},
		"has a token of no node, for no node":  {unbound, nobodys, nil, noNode},
		"is someone else, of no concern to us": {someone, mine, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := p.verdict(t, c.who, c.object, c.old)
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("verdict %q, want %q", got, c.want)
			}
		})
	}
}

func TestClassGPUTakesWholeGPUsOfThisDriverOnly(t *testing.T) {
	objects, _ := render(t)
	class := only[*resourceapi.DeviceClass](t, objects, "gpu.nvidia.com")
	if class.Spec.ExtendedResourceName != nil {
		t.Errorf("extended resource %s by default", *class.Spec.ExtendedResourceName)
	}
	compiled := dracel.GetCompiler(dracel.Features{}).CompileCELExpression(class.Spec.Selectors[0].CEL.Expression, dracel.Options{})
	if compiled.Error != nil {
		t.Fatal(compiled.Error)
	}
	gpu := device.Whole{}.Device(device.Driver{})
	shared := gpu.DeepCopy()
	shared.Attributes["type"] = resourceapi.DeviceAttribute{StringValue: ptr.To("gpu-share")}
	for name, c := range map[string]struct {
		driver string
		device *resourceapi.Device
		want   bool
	}{
		"a GPU that this driver offers whole": {"gpu.nvidia.com", &gpu, true},
		"a share of a GPU":                    {"gpu.nvidia.com", shared, false},
		"another driver's device":             {"tpu.example.com", &gpu, false},
		"another driver's without a type":     {"tpu.example.com", &resourceapi.Device{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := compiled.DeviceMatches(t.Context(), dracel.Device{Driver: c.driver, Attributes: c.device.Attributes, Capacity: c.device.Capacity})
			if err != nil || got != c.want {
				t.Errorf("matches: %v (%v), want %v", got, err, c.want)
			}
		})
	}
}

func TestTheExtendedResourceIsAnOption(t *testing.T) {
	objects, _ := render(t, everything...)
	if name := only[*resourceapi.DeviceClass](t, objects, "gpu.nvidia.com").Spec.ExtendedResourceName; name == nil || *name != "nvidia.com/gpu" {
		t.Errorf("extended resource %v", name)
	}
}
