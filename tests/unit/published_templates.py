"""Chat templates in the formats that models publish, and what a test must know of each.

They are written here from those formats, with the constructs that the published templates use: branches for
tools, namespaces, slices of the messages. An engine that runs these runs those. Qwen2.5-VL
writes as Qwen2-VL.
"""

from __future__ import annotations

GEMMA_MARKS = [("image", "<start_of_image>", "<image_soft_token>")]
LLAVA_MARKS = [("image", "<image>", "<image>"), ("video", "<video>", "<video>")]

QWEN2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' \
+ message['content'] | trim \
+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\
{% endif %}"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

VICUNA = """\
{% set ns = namespace(count=0) %}
{% for message in messages %}
{% if message['role'] == 'system' %}
{{ message['content'] + ' ' -}}
{% elif message['role'] == 'user' %}
{% set ns.count = ns.count + 1 %}
{{ 'USER: ' + message['content'] + ' ' -}}
{% else %}
{{ 'ASSISTANT: ' + message['content'] + eos_token -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""

QWEN2_VL = """\
{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}\
{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
{% set image_count.value = image_count.value + 1 %}\
{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif content['type'] == 'video' or 'video' in content %}\
{% set video_count.value = video_count.value + 1 %}\
{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

INTERNVL = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for content in message['content'] %}\
{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}\
{% elif content['type'] == 'video' %}{{ '<video>\n' }}\
{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAVA_NEXT_MISTRAL = """\
{% for message in messages %}{% if message['role'] == 'system' %}\
{{ '<<SYS>>\n' + message['content'][0]['text'] + '\n<</SYS>>\n\n' }}\
{% elif message['role'] == 'user' %}{{ '[INST] ' }}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}\
{% endfor %}\
{{ ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'][0]['text'] + '</s>' }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

QWEN2_AUDIO = """\
{% set audio_count = namespace(value=0) %}{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if 'audio' in content or 'audio_url' in content or content['type'] == 'audio' %}\
{% set audio_count.value = audio_count.value + 1 %}Audio {{ audio_count.value }}: \
<|audio_bos|><|AUDIO|><|audio_eos|>
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Qwen2.5-Omni: three kinds of media, each between tokens of its side.
QWEN2_5_OMNI = """\
{% set counts = namespace(picture=0, sound=0, video=0) %}{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}\
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}\
{% set counts.picture = counts.picture + 1 %}\
{% if add_vision_id %}Picture {{ counts.picture }}: {% endif %}<|vision_bos|><|IMAGE|><|vision_eos|>\
{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}\
{% set counts.sound = counts.sound + 1 %}\
{% if add_audio_id %}Audio {{ counts.sound }}: {% endif %}<|audio_bos|><|AUDIO|><|audio_eos|>\
{% elif content['type'] == 'video' or 'video' in content %}{% set counts.video = counts.video + 1 %}\
{% if add_vision_id %}Video {{ counts.video }}: {% endif %}<|vision_bos|><|VIDEO|><|vision_eos|>\
{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Audio Flamingo 3: one sound a turn, before its texts, wherever it stands among them.
AUDIO_FLAMINGO_3 = """\
{% if messages[0]['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{% for message in messages if message['content'] is not none %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% set turn = namespace(has_sound=False, text='') %}{% for part in message['content'] %}\
{% if part.get('type') == 'audio' or 'audio' in part %}{% set turn.has_sound = True %}\
{% elif part.get('type') == 'text' or 'text' in part %}{% set turn.text = turn.text + part['text'] %}{% endif %}\
{% endfor %}{% if turn.has_sound %}{{ '<sound>' }}{% endif %}{{ turn.text }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAVA_GENERATION = """\
{% for message in messages %}
{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}
{# Render all images first, then videos #}
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}
{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>\n' }}{% endfor %}
{# Render all text next #}
{% if message['role'] != 'assistant' %}
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}\
{% endfor %}
{% else %}
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}
  {%- generation -%} {{ content['text'] + ' '}} {%- endgeneration -%}
{% endfor %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

CHATML_GENERATION = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
            {{- message.content.strip() + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
"""

QWEN2_5 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. '
+ 'You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) \
or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name }}
            {{- '", "arguments": ' ~ call.arguments | tojson ~ '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA_3_1 = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = '26 Jul 2024' %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system turn stands in the header. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}

{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if builtin_tools is defined or tools is not none %}
    {{- 'Environment: ipython\\n' }}
{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{{- system_message }}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' + call.arguments | tojson + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Mistral 7B Instruct 0.1: no system turn, and nothing between `[/INST] ` and the answer.
MISTRAL_1 = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST] ' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}\
{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""

# Mistral 7B Instruct 0.3: the system turn goes into the last question, answers are trimmed.
MISTRAL_3 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}

{#- Turns alternate, but for those of tools. #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == 'tool'
or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool') }}
    {%- endif %}
{%- endfor %}
"""

# LLaVA-OneVision on Qwen2: media first, each text on a line of its own, the answers marked.
LLAVA_ONEVISION = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}\
{# Images, then videos, then texts #}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}\
{% if message['role'] != 'assistant' %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\\n' + content['text'] }}\
{% endfor %}{% else %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}\
{% generation %}{{ '\\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}\
{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# SmolVLM: roles begin with a capital, and nothing stands between a role's colon and an image.
SMOLVLM = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:\
{% if message['content'][0]['type'] != 'image' %}{{ ' ' }}{% endif %}\
{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'video' %}{{ '<video>' }}{% endif %}\
{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

# Qwen3 with thoughts: those of the last answer are written, or an empty pair of tags; those of earlier answers are left
# out. The messages are read backwards to find the last question.
QWEN3 = """\
{%- set last = namespace(question=messages|length - 1, is_open=true) %}
{%- for message in messages[::-1] %}
    {%- set at = messages|length - 1 - loop.index0 %}
    {%- if last.is_open and message.role == "user" and message.content is string \
and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set last.is_open = false %}
        {%- set last.question = at %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# zai-org/GLM-4.1V-9B-Thinking: contents of users are lists, those of others texts.
GLM_4_1V = """\
[gMASK]<sop>
{%- for msg in messages %}
    {%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}
    {%- elif msg.role == 'user' %}
<|user|>{{ '\\n' }}
        {%- if msg.content is string %}
{{ msg.content }}
        {%- else %}
            {%- for item in msg.content %}
                {%- if item.type == 'video' or 'video' in item %}
<|begin_of_video|><|video|><|end_of_video|>
                {%- elif item.type == 'image' or 'image' in item %}
<|begin_of_image|><|image|><|end_of_image|>
                {%- elif item.type == 'text' %}
{{ item.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
    {%- elif msg.role == 'assistant' %}
        {%- if msg.metadata %}
<|assistant|>{{ msg.metadata }}
{{ msg.content }}
        {%- else %}
<|assistant|>
{{ msg.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}
"""

# Gemma 3: the system's words stand at the head of the first turn, the assistant's role has another name.
GEMMA_3 = """\
{{ bos_token }}{%- set ahead = namespace(text='') -%}\
{%- if messages[0]['role'] == 'system' -%}{%- set ahead.text = messages[0]['content'][0]['text'] + '\n\n' -%}\
{%- set turns = messages[1:] -%}{%- else -%}{%- set turns = messages -%}{%- endif -%}\
{%- for message in turns -%}\
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}\
{{ '<start_of_turn>' + role + '\n' + (ahead.text if loop.first else '') }}\
{%- for part in message['content'] -%}\
{%- if part['type'] == 'image' -%}{{ '<start_of_image>' }}\
{%- elif part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}{%- endfor -%}\
{{ '<end_of_turn>\n' }}{%- endfor -%}\
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

# name: template, content of every turn ("text" or "list"; "list of users": of others text), marks, bos, eos, whether bos is
# added.
TEMPLATES: dict[str, tuple[str, str, list[tuple[str, str, str]], str | None, str | None, bool]] = {
    "qwen2": (QWEN2, "text", LLAVA_MARKS, None, "<|im_end|>", False),
    "qwen2_5": (QWEN2_5, "text", LLAVA_MARKS, None, "<|im_end|>", False),
    "llava_onevision": (LLAVA_ONEVISION, "list", LLAVA_MARKS, None, "<|im_end|>", False),
    "llama3": (LLAMA_3, "text", LLAVA_MARKS, "<|begin_of_text|>", "<|eot_id|>", True),
    "mistral": (MISTRAL, "text", LLAVA_MARKS, "<s>", "</s>", True),
    "llama3_1": (LLAMA_3_1, "text", LLAVA_MARKS, "<|begin_of_text|>", "<|eot_id|>", True),
    "mistral_1": (MISTRAL_1, "text", LLAVA_MARKS, "<s>", "</s>", True),
    "mistral_3": (MISTRAL_3, "text", LLAVA_MARKS, "<s>", "</s>", True),
    "vicuna": (VICUNA, "text", LLAVA_MARKS, "<s>", "</s>", True),
    "qwen2_vl": (
        QWEN2_VL,
        "list",
        [("image", "<|image_pad|>", "<|image_pad|>"), ("video", "<|video_pad|>", "<|video_pad|>")],
        None,
        "<|im_end|>",
        False,
    ),
    "internvl": (
        INTERNVL,
        "list",
        [("image", "<IMG_CONTEXT>", "<IMG_CONTEXT>"), ("video", "<video>", "<IMG_CONTEXT>")],
        None,
        "<|im_end|>",
        False,
    ),
    "smolvlm": (
        SMOLVLM,
        "list",
        [("image", "<image>", "<image>"), ("video", "<video>", "<image>")],
        None,
        "<end_of_utterance>",
        False,
    ),
    "llava_next_mistral": (LLAVA_NEXT_MISTRAL, "list", LLAVA_MARKS[:1], "<s>", "</s>", True),
    "qwen2_audio": (QWEN2_AUDIO, "list", [("audio", "<|AUDIO|>", "<|AUDIO|>")], None, "<|im_end|>", False),
    "qwen2_5_omni": (
        QWEN2_5_OMNI,
        "list",
        [(kind, f"<|{kind.upper()}|>", f"<|{kind.upper()}|>") for kind in ("image", "video", "audio")],
        None,
        "<|im_end|>",
        False,
    ),
    "audioflamingo3": (
        AUDIO_FLAMINGO_3,
        "list",
        [("audio", "<sound>", "<sound>")],
        None,
        "<|im_end|>",
        False,
    ),
    "qwen3": (QWEN3, "text", LLAVA_MARKS, None, "<|im_end|>", False),
    "glm_4_1v": (
        GLM_4_1V,
        "list of users",
        [("image", "<|image|>", "<|image|>"), ("video", "<|video|>", "<|image|>")],
        None,
        "<|endoftext|>",
        False,
    ),
    "gemma_3": (GEMMA_3, "list", GEMMA_MARKS, "<s>", "<end_of_turn>", True),
    "llava_generation": (LLAVA_GENERATION, "list", LLAVA_MARKS, "<s>", "</s>", True),
    "chatml_generation": (CHATML_GENERATION, "text", LLAVA_MARKS, None, "<|im_end|>", False),
}
